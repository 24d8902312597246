package main_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
)

const secret = "s3cr3t"

// mistakes are environments with which the worker must not start. DB stands for the address of a database that
// must not be contacted.
var mistakes = []struct {
	name string
	env  []string // applied on top of DATABASE_URL=DB
	want []string // the variable, the value, the fix
}{
	{"E1 no database", []string{"DATABASE_URL="}, []string{"DATABASE_URL:", "postgres://app:secret@127.0.0.1:5432/app"}},
	{"E2 scheme", []string{"DATABASE_URL=postgre://app:" + secret + "@HOST/app"}, []string{`DATABASE_URL="postgre://app:xxxxx@`, "scheme must be postgres or postgresql"}},
	{"E2 no scheme", []string{"DATABASE_URL=HOST"}, []string{`DATABASE_URL="(hidden)"`, "write it like postgres://"}},
	{"E3 slash", []string{"DATABASE_URL=postgres://app:" + secret + "/x@HOST/app"}, []string{`DATABASE_URL="postgres://(hidden)"`, "percent-encode", "%2F"}},
	{"E3 slash after digits", []string{"DATABASE_URL=postgres://app:12/" + secret + "@HOST/app"}, []string{"DATABASE_URL=", "percent-encode"}},
	{"E3 at and slash", []string{"DATABASE_URL=postgres://app:x@y/" + secret + "@HOST/app"}, []string{"DATABASE_URL=", "percent-encode"}},
	{"E3 at and colon", []string{"DATABASE_URL=postgres://app:x@" + secret + ":y@HOST/app"}, []string{"DATABASE_URL=", "percent-encode", "%40"}},
	{"E3 question mark", []string{"DATABASE_URL=postgres://app:12?" + secret + "@HOST/app"}, []string{"DATABASE_URL=", "percent-encode", "%3F"}},
	{"E3 hash", []string{"DATABASE_URL=postgres://app:12#" + secret + "@HOST/app"}, []string{"DATABASE_URL=", "percent-encode", "%23"}},
	{"E3 percent", []string{"DATABASE_URL=postgres://app:%zz" + secret + "@HOST/app"}, []string{"DATABASE_URL=", "percent-encode", "%25"}},
	{"E4 sslmode", []string{"DATABASE_URL=postgres://app:" + secret + "@HOST/app?sslmode=requrie"}, []string{`sslmode "requrie"`, "disable, allow, prefer, require, verify-ca, verify-full"}},
	{"E4 sslmode of the other form", []string{"DATABASE_URL=host=HOST password=" + secret + " sslmode=requrie"}, []string{`DATABASE_URL="(hidden)"`, `sslmode "requrie"`, "verify-full"}},
	{"E4 certificate", []string{"DATABASE_URL=postgres://app:" + secret + "@HOST/app?sslmode=verify-full&sslrootcert=/nowhere"}, []string{"DATABASE_URL=", "/nowhere"}},
	{"the worker's own address goes first", []string{"WORKER_DATABASE_URL=mysql://app:" + secret + "@HOST/app"}, []string{`WORKER_DATABASE_URL="mysql://app:xxxxx@`, "scheme"}},
	{"E14 no prefix", []string{"WORKER_TYPE_PREFIXES="}, []string{"WORKER_TYPE_PREFIXES: it is set but empty", "unset it for default."}},
	{"E14 blank prefix", []string{"WORKER_TYPE_PREFIXES=  "}, []string{"WORKER_TYPE_PREFIXES: it is set but empty"}},
	{"E16 empty element", []string{"WORKER_TYPE_PREFIXES=media.,,email."}, []string{`WORKER_TYPE_PREFIXES="media.,,email."`, "position 2", "remove it"}},
	{"E16 trailing comma", []string{"WORKER_TYPE_PREFIXES=media.,"}, []string{`WORKER_TYPE_PREFIXES="media.,"`, "position 2"}},
	{"E17 no dot", []string{"WORKER_TYPE_PREFIXES=billing"}, []string{`WORKER_TYPE_PREFIXES="billing"`, `did you mean "billing."`}},
	{"E18 star", []string{"WORKER_TYPE_PREFIXES=billing.*"}, []string{`WORKER_TYPE_PREFIXES="billing.*"`, "without wildcards"}},
	{"E18 percent", []string{"WORKER_TYPE_PREFIXES=billing.%"}, []string{"WORKER_TYPE_PREFIXES", "without wildcards"}},
	{"E20 dot", []string{"WORKER_TYPE_PREFIXES=."}, []string{`WORKER_TYPE_PREFIXES="."`, "use segments"}},
	{"E20 dots", []string{"WORKER_TYPE_PREFIXES=.."}, []string{"WORKER_TYPE_PREFIXES", "use segments"}},
	{"E20 leading dot", []string{"WORKER_TYPE_PREFIXES=.billing."}, []string{"WORKER_TYPE_PREFIXES", "use segments"}},
	{"E21 upper case", []string{"WORKER_TYPE_PREFIXES=Billing."}, []string{`WORKER_TYPE_PREFIXES="Billing."`, `did you mean "billing."`}},
	{"E23 too many", []string{"WORKER_TYPE_PREFIXES=" + strings.Repeat("a.,", 10_000) + "a."}, []string{"WORKER_TYPE_PREFIXES", "at most 100"}},
	{"E24 no handler, strict", []string{"WORKER_TYPE_PREFIXES=billing.", "WORKER_STRICT=true"}, []string{"WORKER_TYPE_PREFIXES", "billing.", "no handler", "WORKER_HANDLERS"}},
	{"E25 newline", []string{"WORKER_TYPE_PREFIXES=a.\nb."}, []string{`WORKER_TYPE_PREFIXES="a.\nb."`, "use segments"}},
	{"E25 emoji", []string{"WORKER_TYPE_PREFIXES=🙂."}, []string{"WORKER_TYPE_PREFIXES", "use segments"}},
	{"E26 no unit", []string{"WORKER_LEASE=30"}, []string{`WORKER_LEASE="30": use a duration with a unit, such as 30s`}},
	{"E27 zero", []string{"WORKER_LEASE=0"}, []string{`WORKER_LEASE="0": use 2s to 24h`}},
	{"E27 negative", []string{"WORKER_LEASE=-5s"}, []string{`WORKER_LEASE="-5s": use 2s to 24h`}},
	{"E28 short", []string{"WORKER_LEASE=500ms"}, []string{`WORKER_LEASE="500ms": use 2s to 24h`}},
	{"E29 long", []string{"WORKER_LEASE=999h"}, []string{`WORKER_LEASE="999h": use 2s to 24h`, "a crash goes unnoticed"}},
	{"E30 heartbeat", []string{"WORKER_LEASE=30s", "WORKER_HEARTBEAT=15s"}, []string{`WORKER_HEARTBEAT="15s": use at most a third of WORKER_LEASE, 10s`}},
	{"E31 poll", []string{"WORKER_POLL_INTERVAL=0"}, []string{`WORKER_POLL_INTERVAL="0": use 10ms to 1h`}},
	{"E32 zero", []string{"WORKER_CONCURRENCY=0"}, []string{`WORKER_CONCURRENCY="0": use a whole number, 1 to 100000`}},
	{"E32 negative", []string{"WORKER_CONCURRENCY=-1"}, []string{`WORKER_CONCURRENCY="-1": use a whole number, 1 to 100000`}},
	{"E32 huge", []string{"WORKER_CONCURRENCY=1e9"}, []string{`WORKER_CONCURRENCY="1e9": use a whole number, 1 to 100000`}},
	{"E32 word", []string{"WORKER_CONCURRENCY=eight"}, []string{`WORKER_CONCURRENCY="eight": use a whole number, 1 to 100000`}},
	{"E33 pool", []string{"DATABASE_URL=postgres://app:" + secret + "@HOST/app?pool_max_conns=3"}, []string{"DATABASE_URL=", "pool_max_conns is 3", "or remove it"}},
	{"E34 attempts", []string{"WORKER_HANDLERS=FILE{billing.: {program: /bin/true, max_attempts: 999999}}"}, []string{"WORKER_HANDLERS=", `"999999"`, "1 to 1000"}},
	{"E35 backoff", []string{"WORKER_BACKOFF_BASE=10m", "WORKER_BACKOFF_CAP=1m"}, []string{`WORKER_BACKOFF_BASE="10m": use at most WORKER_BACKOFF_CAP, 1m0s`}},
	{"E36 infinite", []string{"WORKER_BACKOFF_CAP=Inf"}, []string{`WORKER_BACKOFF_CAP="Inf": use a duration`}},
	{"E36 no number", []string{"WORKER_BACKOFF_CAP=NaN"}, []string{`WORKER_BACKOFF_CAP="NaN": use a duration`}},
	{"E36 too large", []string{"WORKER_BACKOFF_CAP=1e400s"}, []string{`WORKER_BACKOFF_CAP="1e400s": use a duration`}},
	{"E38 long name", []string{"WORKER_ID=" + strings.Repeat("x", 10_000)}, []string{`WORKER_ID="xxx`, "…", "64 printable"}},
	{"E38 control character", []string{"WORKER_ID=a\x1b[31m"}, []string{`WORKER_ID="a\x1b[31m"`, "64 printable"}},
	{"E38 not UTF-8", []string{"WORKER_ID=a\xff"}, []string{`WORKER_ID="a`, "64 printable"}},
	{"E40 exposed", []string{"WORKER_HTTP_ADDR=0.0.0.0:0"}, []string{`WORKER_HTTP_ADDR="0.0.0.0:0"`, "WORKER_HTTP_TOKEN", "127.0.0.1"}},
	{"E40 all addresses", []string{"WORKER_HTTP_ADDR=:0"}, []string{`WORKER_HTTP_ADDR=":0"`, "WORKER_HTTP_TOKEN"}},
	{"E41 short token", []string{"WORKER_HTTP_ADDR=0.0.0.0:0", "WORKER_HTTP_TOKEN=" + secret}, []string{"WORKER_HTTP_TOKEN=(hidden)", "at least 16"}},
	{"E41 well-known token", []string{"WORKER_HTTP_TOKEN=changeme"}, []string{"WORKER_HTTP_TOKEN=(hidden)", "random"}},
	{"address without port", []string{"WORKER_HTTP_ADDR=localhost"}, []string{`WORKER_HTTP_ADDR="localhost"`, "host:port"}},
	{"address with a bad port", []string{"WORKER_HTTP_ADDR=localhost:99999"}, []string{`WORKER_HTTP_ADDR="localhost:99999"`, "0 to 65535"}},
	{"E43 unknown, strict", []string{"WORKER_LEASE_DURATON=30s", "WORKER_STRICT=true"}, []string{"WORKER_LEASE_DURATON", "there is no such variable", "WORKER_LEASE"}},
	{"E45 no file", []string{"WORKER_HANDLERS=/nowhere/handlers.yaml"}, []string{`WORKER_HANDLERS="/nowhere/handlers.yaml"`, "no such file"}},
	{"E45 directory", []string{"WORKER_HANDLERS=/"}, []string{`WORKER_HANDLERS="/"`, "not a regular file"}},
	{"E45 empty file", []string{"WORKER_HANDLERS=FILE"}, []string{`WORKER_HANDLERS="`, "empty"}},
	{"E45 huge file", []string{"WORKER_HANDLERS=FILE" + strings.Repeat("#", 2<<20)}, []string{`WORKER_HANDLERS="`, "1048576"}},
	{"E45 not UTF-8", []string{"WORKER_HANDLERS=FILE\xff\xfe"}, []string{`WORKER_HANDLERS="`, "UTF-8"}},
	{"built-in type", []string{"WORKER_HANDLERS=FILE{default.noop.v1: {program: /bin/true}}"}, []string{`WORKER_HANDLERS="`, "default.noop.v1", "built in"}},
	{"E46 level", []string{"WORKER_LOG_LEVEL=verbos"}, []string{`WORKER_LOG_LEVEL="verbos": use one of debug, info, warn, error`}},
	{"format", []string{"WORKER_LOG_FORMAT=xml"}, []string{`WORKER_LOG_FORMAT="xml": use one of auto, text, json`}},
	{"E50 grace, strict", []string{"WORKER_SHUTDOWN_GRACE=1m", "WORKER_STRICT=true"}, []string{`WORKER_SHUTDOWN_GRACE="1m"`, "longer than WORKER_LEASE", "heartbeats go on"}},
	{"timeout", []string{"WORKER_TIMEOUT=never"}, []string{`WORKER_TIMEOUT="never": use a duration`, "or none"}},
	{"grace", []string{"WORKER_SHUTDOWN_GRACE=-1s"}, []string{`WORKER_SHUTDOWN_GRACE="-1s": use 1ms to 24h, or 0`}},
	{"unknown type grace", []string{"WORKER_UNKNOWN_TYPE_GRACE=5"}, []string{`WORKER_UNKNOWN_TYPE_GRACE="5": use a duration with a unit, such as 5s`}},
	{"postponed", []string{"WORKER_MAX_POSTPONED=0"}, []string{`WORKER_MAX_POSTPONED="0": use a whole number, 1`}},
	{"batch", []string{"WORKER_BATCH=10001"}, []string{`WORKER_BATCH="10001": use a whole number, 1 to 10000`}},
	{"wake-up", []string{"WORKER_WAKEUP=maybe"}, []string{`WORKER_WAKEUP="maybe": use true or false`}},
	{"retention", []string{"WORKER_KEEP_FINISHED=30d"}, []string{`WORKER_KEEP_FINISHED="30d": use a duration`, "none"}},
	{"cleanup", []string{"WORKER_CLEANUP_EVERY=1"}, []string{`WORKER_CLEANUP_EVERY="1": use a duration with a unit`}},
	{"plaintext, strict", []string{"DATABASE_URL=postgres://app:" + secret + "@192.0.2.1/app", "WORKER_STRICT=true"}, []string{"DATABASE_URL=", "without encryption", "sslmode=verify-full"}},
}

// A worker with a mistake in its environment exits with 2 before it contacts anything. In a few lines it names
// the variable, the value and the remedy, and no secret.
func TestMistakes(t *testing.T) {
	t.Parallel()
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			host, connections := cmdtest.Trap(t)
			env := []string{"DATABASE_URL=postgres://app@" + host + "/app"}
			for _, entry := range m.env {
				env = append(env, filled(t, strings.ReplaceAll(entry, "HOST", host)))
			}
			p, code := cmdtest.Run(t, env)
			if code != 2 {
				t.Errorf("exit code %d, want 2", code)
			}
			if n := connections(); n != 0 {
				t.Errorf("%d connections, want none", n)
			}
			got := p.Stderr.String()
			for _, want := range m.want {
				if !strings.Contains(got, want) {
					t.Errorf("stderr lacks %q:\n%.2000s", want, got)
				}
			}
			if strings.Contains(got, secret) || strings.Contains(got, "goroutine ") {
				t.Errorf("stderr has a secret or a stack:\n%s", got)
			}
			if len(got) > 3000 {
				t.Errorf("stderr has %d bytes", len(got))
			}
		})
	}
}

// filled writes the text after FILE to a file, and replaces both by the file's name.
func filled(t *testing.T, entry string) string {
	name, text, ok := strings.Cut(entry, "=FILE")
	if !ok {
		return entry
	}
	path := filepath.Join(t.TempDir(), "handlers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name + "=" + path
}

// All mistakes are printed at once, and not one at each start.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	p, code := cmdtest.Run(t, []string{"WORKER_LEASE=30", "WORKER_CONCURRENCY=eight", "WORKER_TYPE_PREFIXES=a,b", "WORKER_LOG_LEVEL=loud"})
	if code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, want := range []string{"DATABASE_URL", "WORKER_LEASE", "WORKER_CONCURRENCY", `did you mean "a."`, `did you mean "b."`, "WORKER_LOG_LEVEL"} {
		if !strings.Contains(p.Stderr.String(), want) {
			t.Errorf("stderr lacks %q", want)
		}
	}
}

// An HTTP address that is in use is reported before anything else happens.
func TestAddressInUse(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	host, connections := cmdtest.Trap(t)
	p, code := cmdtest.Run(t, []string{"DATABASE_URL=postgres://app@" + host + "/app", "WORKER_HTTP_ADDR=" + other.Addr().String()})
	if code != 2 || connections() != 0 {
		t.Errorf("exit code %d with %d connections, want 2 with none", code, connections())
	}
	if got := p.Stderr.String(); !strings.Contains(got, other.Addr().String()) || !strings.Contains(got, "in use") {
		t.Errorf("stderr: %s", got)
	}
}

// An unknown argument is refused and not ignored.
func TestArguments(t *testing.T) {
	t.Parallel()
	p, code := cmdtest.Run(t, nil, "--concurrency=8")
	if code != 2 || !strings.Contains(p.Stderr.String(), `"--concurrency=8"`) || !strings.Contains(p.Stderr.String(), "environment") {
		t.Errorf("exit code %d: %s", code, p.Stderr.String())
	}
	p, code = cmdtest.Run(t, nil, "--version")
	if code != 0 || !strings.HasPrefix(p.Stdout.String(), "worker ") {
		t.Errorf("exit code %d: %s", code, p.Stdout.String())
	}
}
