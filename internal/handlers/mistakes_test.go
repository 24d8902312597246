package handlers_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/handlers"
)

// Each mistake is reported with line, key, value and remedy, and never with a secret.
func TestMistakes(t *testing.T) {
	t.Setenv("EMPTY", "")
	t.Setenv("FOLDED", "canary\nX-Evil: 1")
	program := script(t, "exit 0")
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const url = "url: 'http://x.test', "
	prog := "program: " + program + ", "
	for _, test := range []struct{ settings, want string }{
		{"", "neither url nor program; add the one to call"},
		{url + prog, "program: url is there, too; keep one of the two"},
		{url + "timout: 5s", `"timout": unknown key; there are url, allow, headers, timeout`},
		{prog + "timout: 5s", `"timout": unknown key; there are program, args, env, dir, timeout`},
		{url + "args: [a]", "args: goes with program, not with url"},
		{prog + "allow: [x.test]", "allow: goes with url, not with program"},
		{url + "lease: 5s, lease: 6s", `"lease": written twice`},
		{url + "<<: {lease: 5s}", `"<<": unknown key`},
		{url + "timeout: 30", `timeout: "30" has no unit; write 30s`},
		{url + "timeout: 0", `timeout: "0" is not above 0`},
		{url + "timeout: -5s", `timeout: "-5s" is not above 0`},
		{url + "timeout: .inf", `timeout: ".inf" is not a duration; write it as`},
		{url + "timeout: NaN", `timeout: "NaN" is not a duration`},
		{url + "timeout: 1e400s", `timeout: "1e400s" is not a duration`},
		{url + "timeout: 9999999999h", "is not a duration"},
		{url + "timeout: ''", "timeout: empty; give it a value or remove it"},
		{url + "timeout: ", "timeout: empty"},
		{url + "lease: &x 5s, timeout: *x", "timeout: an alias; write the value itself"},
		{url + "timeout: [5s]", "timeout: not a single value"},
		{url + "timeout: " + strings.Repeat("5", 500), strings.Repeat("5", 120) + `…" is not a duration`},
		{url + "lease: 500ms", "lease: 500ms is outside 2s to 24h0m0s"},
		{url + "lease: 999h", "lease: 999h0m0s is outside"},
		{url + "lease: none", `lease: "none" is not a duration`},
		{url + "backoff_base: 10s, backoff_cap: 5s", "backoff_base: 10s is above backoff_cap, which is 5s"},
		{url + "backoff_base: 1h", "backoff_base: 1h0m0s is above backoff_cap, which is 5m0s"},
		{url + "concurrency: 0", `concurrency: "0" is not a whole number from 1 to`},
		{url + "concurrency: eight", `concurrency: "eight" is not`},
		{url + "concurrency: 1e9", `concurrency: "1e9" is not`},
		{url + "max_attempts: 1001", `max_attempts: "1001" is not a whole number from 1 to 1000`},
		{url + "max_attempts: 2.5", `max_attempts: "2.5" is not`},
		{url + "max_result_bytes: 1MB", `max_result_bytes: "1MB" is not a whole number from 1 to 1048576`},
		{url + "max_result_bytes: 1048577", `max_result_bytes: "1048577" is not`},

		{"url: ''", "url: empty"},
		{"url: 'ftp://x.test/'", `url: "ftp://x.test/" begins with neither http:// nor https://`},
		{"url: 'file:///etc/passwd'", "begins with neither"},
		{"url: x.test/charge", "begins with neither"},
		{"url: 'https:x.test'", `has no host`},
		{"url: 'https://'", `has no host`},
		{"url: 'https://:443/'", `its host is missing`},
		{"url: 'http://me:canary@x.test:port/'", `url: "http://***@x.test:port/" cannot be parsed`},
		{"url: 'http://me:can/ary@x.test/'", `url: "http://***@x.test/" cannot be parsed`},
		{"url: 'me:canary@x.test'", `url: "***@x.test" begins with neither`},
		{"url: 'ftp://me:canary@x.test/?k=canary'", `url: "ftp://***@x.test/?***" begins with neither`},
		{"url: 'http://me:canary@x.test', headers: {authorization: canary}", `url: "http://***@x.test": has user:password and there is an Authorization header`},
		{"url: 'http://x.test:0/'", "its port is not a number from 1 to 65535"},
		{"url: 'http://x.test:65536/'", "its port is not a number"},
		{"url: 'http://x.test:/'", "its port is not a number"},
		{"url: 'http://x.test/#a'", "has a fragment"},
		{"url: 'http://2130706433/'", "its host is a number that only some programs read as an address; write it as four decimals"},
		{"url: 'http://0x7f000001/'", "its host is a number"},
		{"url: 'http://0177.0.0.1/'", "its host is a number"},
		{"url: 'http://127.1/'", "its host is a number"},
		{"url: 'http://127.0.0.0x1./'", "its host is a number"},
		{"url: 'http://256.256.256.256/'", "its host is a number"},
		{"url: 'http://[fe80::1%251]/'", "its host is an address with a zone"},
		{"url: 'http://bücher.example/'", "its host is neither a host name nor an address"},
		{"url: 'http://a..b/'", "its host is neither"},

		{url + "allow: x.test", "allow: not a list; write [one, two]"},
		{url + "allow: []", `allow: no entry fits the url's host and port; add "x.test"`},
		{url + "allow: [y.test]", `allow: no entry fits the url's host and port; add "x.test"`},
		{url + "allow: ['x.test:443']", "allow: no entry fits"},
		{url + "allow: ['x.test:http']", `allow[0]: "x.test:http" is an entry whose port`},
		{url + "allow: [x.test, '*.x.test']", `allow[1]: "*.x.test" is a wildcard; name each host`},
		{url + "allow: [0.0.0.0/0]", "is everything; name the networks"},
		{url + "allow: ['::/0']", "is everything"},
		{url + "allow: [10.1.2.3/8]", "is not the start of a network; write 10.0.0.0/8"},
		{url + "allow: ['::ffff:10.0.0.0/104']", "is an IPv4 network in IPv6 notation"},
		{url + "allow: ['https://x.test/']", "is not a network; write it as 10.1.0.0/16, or a host without path"},
		{url + "allow: ['2130706433']", "is a number that only some programs"},
		{url + "allow: [~]", "allow[0]: empty"},
		{"url: 'http://10.0.0.1', allow: [10.0.0.2]", `add "10.0.0.1"`},

		{url + "headers: [a]", "headers: not a mapping"},
		{url + "headers: {'a b': x}", `headers "a b": not a header name`},
		{url + "headers: {idempotency-key: x}", `headers "idempotency-key": set by the worker; remove it`},
		{url + "headers: {Host: x}", `set by the worker`},
		{url + "headers: {X-A: b, x-a: c}", `headers "x-a": written twice`},
		{url + "headers: {X-A: env:MISSING}", `headers "X-A": the environment variable "MISSING" is not set`},
		{url + "headers: {X-A: 'env:EMPTY'}", `the environment variable "EMPTY" is not set`},
		{url + "headers: {X-A: 'env:FOLDED'}", `headers "X-A": its value has characters that a header cannot carry`},
		{url + `headers: {X-A: "canary\r\nX: 1"}`, "characters that a header cannot carry"},

		{"program: thumb.py", `program: "thumb.py" is relative; write the full path`},
		{"program: ../thumb.py", "is relative"},
		{"program: /nowhere/thumb.py", `program: "/nowhere/thumb.py" does not exist; correct the path`},
		{"program: " + plain, "may not be executed by the worker's user; chmod +x it"},
		{"program: " + t.TempDir(), "is not a program: is a directory"},
		{`program: "/bin/sh\0"`, "contains a NUL character"},
		{prog + "dir: tmp", `dir: "tmp" is relative`},
		{prog + "dir: /nowhere", `dir: "/nowhere" is not a folder`},
		{prog + "dir: " + plain, "is not a folder"},
		{prog + "args: --fast", "args: not a list; write [one, two]"},
		{prog + "args: [[a]]", "args[0]: not a single value"},
		{prog + `args: ["a\0"]`, "args[0]: contains a NUL"},
		{prog + "env: {A: b}", "env: not a list"},
		{prog + "env: ['can-ary=x']", "env[0]: does not start with the name of a variable"},
		{prog + "env: [A=1, A=2]", `env[1]: "A" is written twice`},
		{prog + "env: [MISSING]", `env[0]: the environment variable "MISSING" is not set`},
		{prog + "env: [WORKFLOW_RUN_ID=1]", `"WORKFLOW_RUN_ID" is set by the worker`},
		{prog + "env: [TRACEPARENT]", `"TRACEPARENT" is set by the worker`},
	} {
		_, err := handlers.Parse("\na.b: {" + test.settings + "}")
		want(t, err, false, "", "handlers.yaml:2: a.b: ", test.want, "!canary")
	}
}

// Each mistake in a pattern is reported in the same way.
func TestPatternMistakes(t *testing.T) {
	for _, test := range []struct{ key, want string }{
		{"billing", `"billing": not a type such as billing.charge.v1 nor a prefix such as billing.; write "billing." for all types under it`},
		{"''", `"": not a type`},
		{".", `".": not a type`},
		{"'*'", `"*": not a type`},
		{"billing.*", `"billing.*": not a type`},
		{".billing.", `not a type`},
		{"billing..v1", `not a type`},
		{"Billing.", `not a type`},
		{"[a.b]", `not a type`},
		{strings.Repeat("a", 199) + ".b", "201 characters; a type has at most 200"},
	} {
		_, err := handlers.Parse(test.key + ": {url: 'http://x.test'}")
		want(t, err, false, "", "handlers.yaml:1: ", test.want)
	}
	_, err := handlers.Parse("a.b: &x {url: 'http://x.test'}\na.b: {url: 'http://x.test'}\na.c: *x\na.d: 5")
	want(t, err, false, "", `handlers.yaml:2: "a.b": written twice`, "handlers.yaml:3: a.c: not a mapping", "handlers.yaml:4: a.d: not a mapping")
}

// All mistakes of a file are reported at once, one line each.
func TestAllMistakes(t *testing.T) {
	_, err := handlers.Parse(`
billing: {url: http://x.test}
a.b:
  url: ftp://x.test
  timeout: 30
  lease: 1s
  concurency: 5
a.c:
  program: thumb.py
  env: [MISSING, 5=]
  max_attempts: 0
`)
	want(t, err, false, "", "handlers.yaml:2:", "handlers.yaml:4:", "handlers.yaml:5:", "handlers.yaml:6:", "handlers.yaml:7:",
		"handlers.yaml:9:", "handlers.yaml:10:", "handlers.yaml:11:")
	if n := strings.Count(err.Error(), "\n") + 1; n != 9 {
		t.Errorf("%d lines: %v", n, err)
	}
}
