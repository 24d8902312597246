package child

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// account is the user that programs run as when this process is root; nil
// when it is not.
type account struct {
	name     string
	uid, gid int
}

var owner = sync.OnceValues(func() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		return &account{name, uid, gid}, nil
	}
	return nil, errors.New("running as root, and neither user postgres nor nobody exists to run servers as")
})

func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
}

// Own gives path to the user that programs run as. It does nothing unless
// this process is root.
func Own(path string) error {
	a, err := owner()
	if a == nil || err != nil {
		return err
	}
	return os.Chown(path, a.uid, a.gid)
}

// Enterable returns an error that names the first directory on the way to dir,
// dir included, which the user that programs run as may not enter.
func Enterable(dir string) error {
	a, err := owner()
	if a == nil || err != nil {
		return err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := Enterable(parent); err != nil {
			return err
		}
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !a.mayEnter(info) {
		return fmt.Errorf("user %s may not enter %s", a.name, dir)
	}
	return nil
}

func (a *account) mayEnter(info os.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch mode := info.Mode(); {
	case ok && int(stat.Uid) == a.uid:
		return mode&0o100 != 0
	case ok && int(stat.Gid) == a.gid:
		return mode&0o010 != 0
	default:
		return mode&0o001 != 0
	}
}

// TempDir creates a directory for a program, below the first of parents that
// works; none means the system's temporary directories.
func TempDir(pattern string, parents ...string) (string, error) {
	var errs []error
	for _, parent := range append(parents, os.TempDir(), "/tmp", "/var/tmp") {
		if err := Enterable(parent); err != nil {
			errs = append(errs, err)
			continue
		}
		dir, err := os.MkdirTemp(parent, pattern)
		if err == nil {
			return dir, Own(dir)
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}
