package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// Bouncer starts a pgbouncer in front of a database and returns the connection
// string that leads through it. It pools transactions over ten connections, as
// production setups do: nothing of a session outlives a transaction, and
// prepared statements with names do not work. It ends with t.
//
// Root on Debian has pgbouncer installed if it is missing.
func Bouncer(t testing.TB, databaseURL string) string {
	t.Helper()
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	program, err := pgbouncer()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := child.TempDir("pgbouncer-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // mostly done by the watchdog
	b := bouncer{program: program, dir: dir, config: config.ConnConfig}
	err = errEnded
	for try := 0; try < 3 && errors.Is(err, errEnded); try++ {
		err = b.start(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.process.End)
	return b.url()
}

// errEnded means that pgbouncer ended by itself: another program may have
// snatched its port.
var errEnded = errors.New("it ended")

type bouncer struct {
	program string
	dir     string
	config  *pgx.ConnConfig // of the database behind it
	port    int
	process *child.Process
}

func (b *bouncer) start(ctx context.Context) (err error) {
	if b.port, err = child.Port(); err != nil {
		return err
	}
	conf := filepath.Join(b.dir, "pgbouncer.ini")
	if err := os.WriteFile(conf, []byte(b.settings()), 0o600); err != nil {
		return err
	}
	if err := child.Own(conf); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(b.dir, "pgbouncer.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	b.process, err = child.Start(child.Command{
		Path: b.program, Args: []string{conf}, Dir: b.dir, Remove: true, Last: syscall.SIGKILL, Output: log,
	})
	if err != nil {
		return err
	}
	if err := b.ready(ctx); err != nil {
		text, _ := os.ReadFile(log.Name())
		b.process.Signal(syscall.SIGKILL)
		b.process.Gone(0)
		_ = b.process.Release()
		return fmt.Errorf("pgbouncer: %w\n%s", err, text[max(0, len(text)-2000):])
	}
	return nil
}

func (b *bouncer) ready(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	poll(patience, func() bool {
		if b.process.Gone(time.Millisecond) {
			err = errEnded
			return true
		}
		var conn *pgx.Conn
		if conn, err = pgx.Connect(ctx, b.url()); err != nil {
			return false
		}
		err = errors.Join(conn.Ping(ctx), conn.Close(ctx))
		return err == nil
	})
	return err
}

func (b *bouncer) url() string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(b.config.User),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(b.port)),
		Path:     "/" + b.config.Database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

func (b *bouncer) settings() string {
	server := map[string]string{
		"host":     b.config.Host,
		"port":     strconv.Itoa(int(b.config.Port)),
		"user":     b.config.User,
		"password": b.config.Password,
	}
	if path := b.config.RuntimeParams["search_path"]; path != "" {
		server["connect_query"] = "SET search_path TO " + path
	}
	var options strings.Builder
	for name, value := range server {
		if value == "" {
			continue
		}
		fmt.Fprintf(&options, " %s='%s'", name, strings.ReplaceAll(value, "'", "''"))
	}
	tls := "disable"
	if b.config.TLSConfig != nil {
		tls = "require"
	}
	return fmt.Sprintf(`
[databases]
* =%s

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 10
max_client_conn = 1000
server_tls_sslmode = %s
`, options.String(), b.port, tls)
}

// pgbouncer returns the path of the program, installed if need and rights be.
func pgbouncer() (string, error) {
	if path, err := lookPgbouncer(); err == nil {
		return path, nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return "", errors.New("pgbouncer is needed: apt-get install pgbouncer, or brew install pgbouncer")
	}
	if err := install(apt); err != nil {
		return "", err
	}
	return lookPgbouncer()
}

// lookPgbouncer also looks where Debian has it, which is not on everyone's
// PATH.
func lookPgbouncer() (string, error) {
	if path, err := exec.LookPath("pgbouncer"); err == nil {
		return path, nil
	}
	return exec.LookPath("/usr/sbin/pgbouncer")
}

// install lets one process at a time run apt-get, and the others find what it
// installed.
func install(apt string) error {
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "pgtest-apt.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := lookPgbouncer(); err == nil {
		return nil
	}
	if run(apt, "install", "-y", "pgbouncer") == nil {
		return nil
	}
	// The package lists may be missing or old.
	return errors.Join(run(apt, "update"), run(apt, "install", "-y", "pgbouncer"))
}

func run(program string, args ...string) error {
	cmd := exec.Command(program, args...)
	// In run level 1 the package does not start a daemon.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, output)
	}
	return nil
}
