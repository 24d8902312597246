package main_test

import (
	"net"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
)

const secret = "s3cr3t"

// mistakes are changes to a valid environment with which the dispatcher must not start. HOST stands for the
// address of a database that must not be contacted.
var mistakes = []struct {
	name string
	env  []string
	want []string // the variable, the value, the fix
}{
	{"no database", []string{"DATABASE_URL="}, []string{"DATABASE_URL:", "postgres://app:secret@127.0.0.1:5432/app"}},
	{"scheme of the database", []string{"DATABASE_URL=postgre://app:" + secret + "@HOST/app"}, []string{`DATABASE_URL="postgre://app:xxxxx@`, "scheme must be postgres or postgresql"}},
	{"the dispatcher's own address goes first", []string{"DISPATCHER_DATABASE_URL=mysql://app:" + secret + "@HOST/app"}, []string{`DISPATCHER_DATABASE_URL="mysql://app:xxxxx@`, "scheme"}},
	{"no sinks", []string{"DISPATCHER_SINKS="}, []string{"DISPATCHER_SINKS:", "stdout: or crm=https://crm.example/events"}},
	{"blank sinks", []string{"DISPATCHER_SINKS=   "}, []string{"DISPATCHER_SINKS:", "stdout:"}},
	{"no URL", []string{"DISPATCHER_SINKS=" + secret}, []string{"DISPATCHER_SINKS=(hidden): element 1", "write it like crm=https://"}},
	{"broken URL", []string{"DISPATCHER_SINKS=stdout: crm=https://app:%zz" + secret + "@crm.example"}, []string{"DISPATCHER_SINKS=(hidden): element 2", "no URL"}},
	{"unknown scheme", []string{"DISPATCHER_SINKS=crm=ftp://app:" + secret + "@crm.example"}, []string{"DISPATCHER_SINKS=(hidden): element 1", "no sink for ftp:", "exec, http, https", "stdout"}},
	{"bad name", []string{"DISPATCHER_SINKS=CRM=https://crm.example/" + secret}, []string{"DISPATCHER_SINKS=", `"CRM" cannot be a name`, "a to z"}},
	{"long name", []string{"DISPATCHER_SINKS=" + strings.Repeat("x", 41) + "=stdout:"}, []string{"DISPATCHER_SINKS=", "at most 40"}},
	{"no name", []string{"DISPATCHER_SINKS==stdout:"}, []string{"DISPATCHER_SINKS=", `"" cannot be a name`}},
	{"same name", []string{"DISPATCHER_SINKS=crm=stdout: crm=https://crm.example/" + secret}, []string{"DISPATCHER_SINKS=", "element 2", "name crm, too"}},
	{"same scheme without names", []string{"DISPATCHER_SINKS=https://a.example/" + secret + " https://b.example/"}, []string{"DISPATCHER_SINKS=", "element 2", "name https, too", "other=https:"}},
	{"unknown option", []string{"DISPATCHER_SINKS=crm=https://crm.example/" + secret + "#mod=binary"}, []string{"DISPATCHER_SINKS=", `crm: has no option "mod"`, "types, rate, mode, allow"}},
	{"option of others", []string{"DISPATCHER_SINKS=stdout:#allow=10.0.0.0/8"}, []string{"DISPATCHER_SINKS=", `stdout: has no option "allow"`, "types, rate"}},
	{"option twice", []string{"DISPATCHER_SINKS=stdout:#rate=1&rate=2"}, []string{"DISPATCHER_SINKS=", "rate is given twice"}},
	{"broken options", []string{"DISPATCHER_SINKS=stdout:#types=a;b"}, []string{"DISPATCHER_SINKS=", "#types=billing.&rate=100"}},
	{"rate", []string{"DISPATCHER_SINKS=stdout:#rate=fast"}, []string{"DISPATCHER_SINKS=", `rate: "fast" is no number of events a second`}},
	{"rate of zero", []string{"DISPATCHER_SINKS=stdout:#rate=0"}, []string{"DISPATCHER_SINKS=", `rate: "0"`, "0.001 to 1000000000"}},
	{"rate that is no number", []string{"DISPATCHER_SINKS=stdout:#rate=NaN"}, []string{"DISPATCHER_SINKS=", `rate: "NaN"`}},
	{"rate without end", []string{"DISPATCHER_SINKS=stdout:#rate=Inf"}, []string{"DISPATCHER_SINKS=", `rate: "Inf"`}},
	{"types with an empty one", []string{"DISPATCHER_SINKS=stdout:#types=billing.,"}, []string{"DISPATCHER_SINKS=", `types: "" is no prefix`}},
	{"types with a wildcard", []string{"DISPATCHER_SINKS=stdout:#types=billing.*"}, []string{"DISPATCHER_SINKS=", `types: "billing.*" is no prefix`, "without wildcards"}},
	{"mode", []string{"DISPATCHER_SINKS=crm=https://crm.example/" + secret + "#mode=json"}, []string{"DISPATCHER_SINKS=", `mode: "json"; use structured or binary`}},
	{"allow", []string{"DISPATCHER_SINKS=crm=https://crm.example/" + secret + "#allow=10.0.0.1"}, []string{"DISPATCHER_SINKS=", `allow: "10.0.0.1" is not a network; write it as 10.1.0.0/16`}},
	{"K38 private address", []string{"DISPATCHER_SINKS=crm=http://app:" + secret + "@169.254.169.254/x"}, []string{"DISPATCHER_SINKS=", "crm: ", "169.254.169.254 is not public", "allow=169.254.169.254/32"}},
	{"K38 localhost", []string{"DISPATCHER_SINKS=crm=http://localhost/" + secret}, []string{"DISPATCHER_SINKS=", "is not public"}},
	{"K38 a number", []string{"DISPATCHER_SINKS=crm=http://2130706433/" + secret}, []string{"DISPATCHER_SINKS=", "only some programs read as an address"}},
	{"no program", []string{"DISPATCHER_SINKS=exec:/nowhere/forward"}, []string{"DISPATCHER_SINKS=", `exec: program "/nowhere/forward" cannot be started`}},
	{"program with arguments", []string{"DISPATCHER_SINKS=exec:/bin/cat?-u"}, []string{"DISPATCHER_SINKS=", "arguments cannot be given"}},
	{"program's environment", []string{"DISPATCHER_SINKS=exec:/bin/cat#env=NOWHERE"}, []string{"DISPATCHER_SINKS=", `no variable "NOWHERE"`}},
	{"stdout with a path", []string{"DISPATCHER_SINKS=stdout:/tmp/x"}, []string{"DISPATCHER_SINKS=", "nothing may follow stdout:"}},
	{"no source", []string{"DISPATCHER_SOURCE="}, []string{"DISPATCHER_SOURCE:", "https://shop.example/billing"}},
	{"source with a blank", []string{"DISPATCHER_SOURCE=our shop"}, []string{`DISPATCHER_SOURCE="our shop"`, "no URI"}},
	{"source that is broken", []string{"DISPATCHER_SOURCE=http://[shop"}, []string{`DISPATCHER_SOURCE="http://[shop"`, "no URI"}},
	{"source with a broken password", []string{"DISPATCHER_SOURCE=https://app:%zz" + secret + "@shop.example"}, []string{"DISPATCHER_SOURCE=", "no URI"}},
	{"source with a password", []string{"DISPATCHER_SOURCE=https://app:" + secret + "@shop.example"}, []string{"DISPATCHER_SOURCE=", "every consumer would see it"}},
	{"K41 short secret", []string{"DISPATCHER_WEBHOOK_SECRET=" + secret}, []string{"DISPATCHER_WEBHOOK_SECRET=(hidden)", "at least 24", "openssl rand -hex 24"}},
	{"K41 coded secret", []string{"DISPATCHER_WEBHOOK_SECRET=whsec_" + secret + "!"}, []string{"DISPATCHER_WEBHOOK_SECRET=(hidden)", "base64"}},
	{"key id", []string{"DISPATCHER_WEBHOOK_KEY_ID=a\nb"}, []string{`DISPATCHER_WEBHOOK_KEY_ID="a\nb"`, "64 printable"}},
	{"id", []string{"DISPATCHER_ID=" + strings.Repeat("x", 65)}, []string{`DISPATCHER_ID="xxx`, "64 printable"}},
	{"elsewhere", []string{"DISPATCHER_ELSEWHERE=audit,CRM"}, []string{`DISPATCHER_ELSEWHERE="audit,CRM"`, `"CRM" is no name of a sink`}},
	{"batch", []string{"DISPATCHER_BATCH=0"}, []string{`DISPATCHER_BATCH="0": use a whole number, 1 to 10000`}},
	{"bytes", []string{"DISPATCHER_BATCH_BYTES=8MB"}, []string{`DISPATCHER_BATCH_BYTES="8MB": use a whole number, 1024 to 268435456`}},
	{"poll interval", []string{"DISPATCHER_POLL_INTERVAL=0"}, []string{`DISPATCHER_POLL_INTERVAL="0": use 1ms to 1m`}},
	{"claim without unit", []string{"DISPATCHER_CLAIM=60"}, []string{`DISPATCHER_CLAIM="60": use a duration with a unit, such as 60s`}},
	{"claim", []string{"DISPATCHER_CLAIM=999h"}, []string{`DISPATCHER_CLAIM="999h": use 1s to 1h`, "a crash holds up"}},
	{"attempts", []string{"DISPATCHER_MAX_ATTEMPTS=many"}, []string{`DISPATCHER_MAX_ATTEMPTS="many": use a whole number, 1 to 1000000`}},
	{"backoff", []string{"DISPATCHER_BACKOFF_BASE=10m", "DISPATCHER_BACKOFF_CAP=1m"}, []string{`DISPATCHER_BACKOFF_BASE="10m": use at most DISPATCHER_BACKOFF_CAP, 1m0s`}},
	{"cap", []string{"DISPATCHER_BACKOFF_CAP=Inf"}, []string{`DISPATCHER_BACKOFF_CAP="Inf": use a duration`}},
	{"grace", []string{"DISPATCHER_SHUTDOWN_GRACE=-1s"}, []string{`DISPATCHER_SHUTDOWN_GRACE="-1s": use 1ms to 24h`}},
	{"exposed", []string{"DISPATCHER_HTTP_ADDR=0.0.0.0:0"}, []string{`DISPATCHER_HTTP_ADDR="0.0.0.0:0"`, "DISPATCHER_HTTP_TOKEN", "127.0.0.1"}},
	{"short token", []string{"DISPATCHER_HTTP_ADDR=0.0.0.0:0", "DISPATCHER_HTTP_TOKEN=" + secret}, []string{"DISPATCHER_HTTP_TOKEN=(hidden)", "at least 16"}},
	{"address", []string{"DISPATCHER_HTTP_ADDR=localhost"}, []string{`DISPATCHER_HTTP_ADDR="localhost"`, "host:port"}},
	{"level", []string{"DISPATCHER_LOG_LEVEL=verbos"}, []string{`DISPATCHER_LOG_LEVEL="verbos": use one of debug, info, warn, error`}},
	{"format", []string{"DISPATCHER_LOG_FORMAT=xml"}, []string{`DISPATCHER_LOG_FORMAT="xml": use one of auto, text, json`}},
	{"fail fast", []string{"DISPATCHER_FAIL_FAST=maybe"}, []string{`DISPATCHER_FAIL_FAST="maybe": use true or false`}},
}

// With a mistake in its environment a dispatcher exits with 2 before it contacts anything. It names the
// variable, the value and the fix in a few lines, and prints no secret.
func TestMistakes(t *testing.T) {
	t.Parallel()
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			host, connections := cmdtest.Trap(t)
			env := []string{"DATABASE_URL=postgres://app@" + host + "/app", "DISPATCHER_SINKS=stdout:", "DISPATCHER_SOURCE=/test"}
			for _, entry := range m.env {
				env = append(env, strings.ReplaceAll(entry, "HOST", host))
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
			if lines := strings.Count(got, "\n"); lines > 4 || len(got) > 2000 {
				t.Errorf("stderr has %d lines:\n%s", lines, got)
			}
		})
	}
}

// All mistakes are reported in one start.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	p, code := cmdtest.Run(t, []string{"DISPATCHER_SINKS=a=ftp://x b=stdout:#color=red b=stdout: c=http://10.0.0.1 " + secret, "DISPATCHER_CLAIM=60", "DISPATCHER_BATCH=many",
		"DISPATCHER_WEBHOOK_SECRET=" + secret, "DISPATCHER_LOG_LEVEL=loud"})
	if code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, want := range []string{"DATABASE_URL:", "DISPATCHER_SOURCE:", "no sink for ftp:", `no option "color"`, "name b, too", "element 5", "10.0.0.1 is not public", "DISPATCHER_CLAIM=", "DISPATCHER_BATCH=",
		"DISPATCHER_WEBHOOK_SECRET=(hidden)", "DISPATCHER_LOG_LEVEL=", "See dispatcher --help."} {
		if !strings.Contains(p.Stderr.String(), want) {
			t.Errorf("stderr lacks %q", want)
		}
	}
	if strings.Contains(p.Stderr.String(), secret) {
		t.Errorf("stderr has a secret:\n%s", p.Stderr.String())
	}
	// Once all sinks can be parsed, all that cannot be opened are reported.
	p, code = cmdtest.Run(t, []string{"DATABASE_URL=postgres://app@127.0.0.1:1/app", "DISPATCHER_SOURCE=/test",
		"DISPATCHER_SINKS=a=exec:/nowhere/a b=http://10.0.0.1/ c=stdout:#rate=fast"})
	for _, want := range []string{"/nowhere/a", "10.0.0.1 is not public", `"fast"`} {
		if code != 2 || !strings.Contains(p.Stderr.String(), want) {
			t.Errorf("exit code %d, stderr lacks %q:\n%s", code, want, p.Stderr.String())
		}
	}
}

// An HTTP address that is in use is reported before the database is contacted.
func TestAddressInUse(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	host, connections := cmdtest.Trap(t)
	p, code := cmdtest.Run(t, []string{"DATABASE_URL=postgres://app@" + host + "/app", "DISPATCHER_SINKS=stdout:", "DISPATCHER_SOURCE=/test",
		"DISPATCHER_HTTP_ADDR=" + other.Addr().String()})
	if code != 2 || connections() != 0 {
		t.Errorf("exit code %d with %d connections, want 2 with none", code, connections())
	}
	if got := p.Stderr.String(); !strings.Contains(got, other.Addr().String()) || !strings.Contains(got, "in use") {
		t.Errorf("stderr: %s", got)
	}
}

// Each doubtful setting causes a warning with a fix.
func TestWarnings(t *testing.T) {
	t.Parallel()
	p := cmdtest.Start(t, []string{"DATABASE_URL=postgres://app:" + secret + "@127.0.0.1:1/app", "DISPATCHER_SINKS=crm=https://crm.example/" + secret, "DISPATCHER_SOURCE=/test",
		"DISPATCHER_SINK=stdout:", "DISPATCHER_CLAIM=5s", "DISPATCHER_SERVICE_HOST=10.0.0.1"})
	p.AwaitLog("waiting for the database")
	for _, want := range []string{
		"DISPATCHER_SINK: there is no such variable; remove it, or write DISPATCHER_SINKS if that is meant",
		"slow to answer are never heard",
	} {
		if !strings.Contains(p.Stderr.String(), want) {
			t.Errorf("stderr lacks %q", want)
		}
	}
	if got := p.Stderr.String(); strings.Contains(got, secret) || strings.Contains(got, "SERVICE_HOST") {
		t.Errorf("stderr: %s", got)
	}
}

// An unknown argument, or a wrong number of them, is refused with exit code 2.
func TestArguments(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--batch=8"}, {"--abandon"}, {"--abandon", "a", "b"}, {"--version", "x"}} {
		if p, code := cmdtest.Run(t, nil, args...); code != 2 || !strings.Contains(p.Stderr.String(), args[0]) || !strings.Contains(p.Stderr.String(), "environment") {
			t.Errorf("%v: exit code %d: %s", args, code, p.Stderr.String())
		}
	}
	if p, code := cmdtest.Run(t, nil, "--version"); code != 0 || !strings.HasPrefix(p.Stdout.String(), "dispatcher ") {
		t.Errorf("exit code %d: %s", code, p.Stdout.String())
	}
	if p, code := cmdtest.Run(t, nil, "--help"); code != 0 || !strings.Contains(p.Stdout.String(), "DISPATCHER_SINKS") {
		t.Errorf("exit code %d: %s", code, p.Stdout.String())
	}
	if p, code := cmdtest.Run(t, []string{"DISPATCHER_DATABASE_URL=mysql://app:" + secret + "@x/y"}, "--abandon", "crm"); code != 2 ||
		!strings.Contains(p.Stderr.String(), "DISPATCHER_DATABASE_URL") || strings.Contains(p.Stderr.String(), secret) {
		t.Errorf("exit code %d: %s", code, p.Stderr.String())
	}
}
