// Package pgbouncer runs a private pgbouncer in front of a database, for tests. It runs in transaction mode over ten
// connections, as production setups do: no session state outlives a transaction, and named prepared statements do not
// work.
package pgbouncer

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
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgserver/child"
)

// patience is how long a pgbouncer may take to answer after its start.
const patience = 30 * time.Second

// A Bouncer is a running pgbouncer. When this process ends, even by kill -9, it ends too.
//
// If it ends unexpectedly, it is started again at the same address, as a service manager would do. Versions before
// 1.20.1 sometimes end when clients cancel statements, as this project does with statements that take too long
// (https://github.com/pgbouncer/pgbouncer/issues/822).
type Bouncer struct {
	program string
	dir     string
	config  *pgx.ConnConfig // of the database behind it
	port    int
	process *child.Process

	ended chan time.Time // when it has ended unexpectedly, as far as the buffer has room
	stop  chan struct{}  // closed by Stop
	kept  sync.WaitGroup
}

// Start starts a pgbouncer in front of a database. All clients connect as the user of databaseURL. As root on Debian,
// Start installs pgbouncer if it is missing.
func Start(ctx context.Context, databaseURL string) (*Bouncer, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, err
	}
	b := &Bouncer{config: config.ConnConfig, ended: make(chan time.Time, 100), stop: make(chan struct{})}
	if b.program, err = pgbouncer(); err != nil {
		return nil, err
	}
	if b.dir, err = child.TempDir("pgbouncer-"); err != nil {
		return nil, err
	}
	err = errEnded
	for try := 0; try < 3 && errors.Is(err, errEnded); try++ {
		if b.port, err = child.Port(); err == nil {
			err = b.start(ctx)
		}
	}
	if err != nil {
		_ = os.RemoveAll(b.dir)
		return nil, err
	}
	b.kept.Go(b.keep)
	return b, nil
}

// Addr returns its address.
func (b *Bouncer) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(b.port)) }

// Ended receives the time whenever pgbouncer ended unexpectedly and was started again. Stop closes the channel.
func (b *Bouncer) Ended() <-chan time.Time { return b.ended }

// Stop ends pgbouncer and closes its connections.
func (b *Bouncer) Stop() {
	close(b.stop)
	b.kept.Wait()
	_ = os.RemoveAll(b.dir) // mostly done by the watchdog
}

// keep starts the program again whenever it has ended, until Stop is called, and then ends it.
func (b *Bouncer) keep() {
	defer close(b.ended)
	defer func() { b.process.End() }()
	for {
		select {
		case <-b.stop:
			return
		default:
		}
		if !b.process.Gone(20 * time.Millisecond) {
			continue
		}
		select {
		case b.ended <- time.Now():
		default:
		}
		_ = b.process.Release() // its directory stays
		if err := b.start(context.Background()); err != nil {
			return // another program took its port; the next connection fails
		}
	}
}

// errEnded means that pgbouncer ended unexpectedly. Another program may have taken its port.
var errEnded = errors.New("it ended")

func (b *Bouncer) start(ctx context.Context) error {
	conf := filepath.Join(b.dir, "pgbouncer.ini")
	if err := os.WriteFile(conf, []byte(b.settings()), 0o600); err != nil {
		return err
	}
	if err := child.Own(conf); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(b.dir, "pgbouncer.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	process, err := child.Start(child.Command{
		Path: b.program, Args: []string{conf}, Dir: b.dir, Remove: true, Last: syscall.SIGKILL, Output: log,
	})
	if err != nil {
		return err
	}
	b.process = process
	if err := b.ready(ctx); err != nil {
		text, _ := os.ReadFile(log.Name())
		b.process.Signal(syscall.SIGKILL)
		b.process.Gone(0)
		_ = b.process.Release()
		return fmt.Errorf("pgbouncer: %w\n%s", err, text[max(0, len(text)-2000):])
	}
	return nil
}

func (b *Bouncer) ready(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for ctx.Err() == nil {
		if b.process.Gone(5 * time.Millisecond) {
			return errEnded
		}
		var conn *pgx.Conn
		if conn, err = pgx.Connect(ctx, b.URL()); err != nil {
			continue
		}
		if err = errors.Join(conn.Ping(ctx), conn.Close(ctx)); err == nil {
			return nil
		}
	}
	return err
}

// URL returns the connection string that leads through the pgbouncer.
func (b *Bouncer) URL() string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(b.config.User),
		Host:     b.Addr(),
		Path:     "/" + b.config.Database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

func (b *Bouncer) settings() string {
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
server_login_retry = 1
max_client_conn = 1000
server_tls_sslmode = %s
`, options.String(), b.port, tls)
}

// pgbouncer returns the path of the program. It installs the program if it is missing and this process may do so.
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

// lookPgbouncer also looks where Debian installs it, which is not on everyone's PATH.
func lookPgbouncer() (string, error) {
	if path, err := exec.LookPath("pgbouncer"); err == nil {
		return path, nil
	}
	return exec.LookPath("/usr/sbin/pgbouncer")
}

// install runs apt-get in one process at a time. The other processes then find what was installed.
func install(apt string) error {
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "pgbouncer-apt.lock"), os.O_CREATE|os.O_RDWR, 0o600)
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
