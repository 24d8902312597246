package service

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// With any environment, either the worker can be created, or each problem is one clean line that starts with
// the name of the variable. Secrets are never shown.
func FuzzLoad(f *testing.F) {
	f.Add("media.,email.", "worker", "30s", "10s", "1s", "5m", "0", "127.0.0.1:0", "", "false")
	f.Add("default.", "", "2s", "", "", "", "none", "", "x", "true")
	f.Add(" a. ,a.b.", strings.Repeat("é", 40), "24h", "8h", "6m", "", "-1s", ":http", "changeme", "")
	f.Add("A.,*,,..", "a\tb", "30", "1h", "1ms", "1ns", "1e9", "[::1]:65536", "\x1b[31m", "maybe")
	f.Fuzz(func(t *testing.T, prefixes, id, lease, heartbeat, base, limit, number, address, token, strict string) {
		const canary = "CANARY"
		for name, value := range map[string]string{
			"DATABASE_URL": "postgres://app:" + canary + "@127.0.0.1/app", "WORKER_TYPE_PREFIXES": prefixes, "WORKER_ID": id,
			"WORKER_LEASE": lease, "WORKER_HEARTBEAT": heartbeat, "WORKER_BACKOFF_BASE": base, "WORKER_BACKOFF_CAP": limit,
			"WORKER_CONCURRENCY": number, "WORKER_SHUTDOWN_GRACE": number, "WORKER_HTTP_ADDR": address,
			"WORKER_HTTP_TOKEN": canary + token, "WORKER_STRICT": strict,
		} {
			if strings.Contains(value, "\x00") {
				return // no environment can contain it
			}
			t.Setenv(name, value)
		}
		s := load(Program{Name: "worker"})
		for _, line := range slices.Concat(s.report.Problems, s.report.Warnings) {
			if !strings.HasPrefix(line, "WORKER_") || !utf8.ValidString(line) || len(line) > 2000 || strings.ContainsFunc(line, unicode.IsControl) {
				t.Errorf("unfit line %q", line)
			}
			if strings.Contains(line, canary) {
				t.Errorf("a secret is shown: %s", line)
			}
		}
		if len(s.report.Problems) > 0 {
			return
		}
		s.HTTPAddr.Value = "" // the address may be in use
		p, problems := newProcess(s, slog.New(slog.DiscardHandler))
		if len(problems) > 0 {
			t.Fatalf("accepted, but then: %q", problems)
		}
		p.discard()
	})
}
