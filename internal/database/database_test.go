package database_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/internal/database"
)

// A server on which no version of the engine works is refused with a FatalError.
func TestSupported(t *testing.T) {
	for _, row := range []struct {
		facts database.Facts
		want  string
	}{
		{database.Facts{Version: 140012, Encoding: "UTF8"}, "Postgres 14.12; Postgres 15"},
		{database.Facts{Version: 150000, Encoding: "SQL_ASCII"}, "SQL_ASCII"},
		{database.Facts{Version: 150000, Encoding: "UTF8"}, ""},
		{database.Facts{Version: 190001, Encoding: "UTF8"}, ""},
	} {
		err := row.facts.Supported()
		var final *database.FatalError
		if row.want == "" && err != nil || row.want != "" && (!errors.As(err, &final) || !strings.Contains(err.Error(), row.want)) {
			t.Errorf("%+v: %v, want %q", row.facts, err, row.want)
		}
	}
}

// A server that accepts no writes is not refused for good, since it may accept them later.
func TestWritable(t *testing.T) {
	for _, facts := range []database.Facts{{Recovery: true}, {ReadOnly: true}} {
		err := facts.Writable()
		var final *database.FatalError
		if err == nil || errors.As(err, &final) {
			t.Errorf("%+v: %v", facts, err)
		}
	}
}

// An address is shown without its secrets, and hidden if they cannot be located.
func TestShown(t *testing.T) {
	for address, want := range map[string]string{
		"postgres://app:s3cr3t@db/app":                   "postgres://app:xxxxx@db/app",
		"postgres://app@db/app":                          "postgres://app@db/app",
		"postgres://db/app?password=s3cr3t":              "postgres://db/app?password=xxxxx",
		"postgres://app:a@s3cr3t/x@db/app":               "postgres://(hidden)",
		"postgres://app:12/s3cr3t@db/app":                "postgres://(hidden)",
		"postgres://app:12?s3cr3t@db/app":                "postgres://(hidden)",
		"postgres://app:12#s3cr3t@db/app":                "postgres://(hidden)",
		"postgres://app:p@s3cr3t:w@db/app":               "postgres://(hidden)",
		"postgres://app:%s3cr3t@db/app":                  "postgres://(hidden)",
		"host=db password=s3cr3t":                        "(hidden)",
		"app:s3cr3t@db/app":                              "(hidden)",
		"s3cr3t://":                                      "(hidden)",
		"postgres://app:p%2Fw@db/app?sslpassword=s3cr3t": "postgres://app:xxxxx@db/app?sslpassword=xxxxx",
	} {
		if got := database.Shown(address); got != want {
			t.Errorf("%s is shown as %s, want %s", address, got, want)
		}
	}
}

// What the driver quotes of an address contains no characters that are not printable.
func TestReasonIsClean(t *testing.T) {
	_, err := database.Parse("postgres://db/app?a=b&\x8c\u202e")
	if want := `it cannot be used: failed to parse as URL (missing key/value separator "=" in URI query parameter: "��")`; err == nil || err.Error() != want {
		t.Errorf("error = %v, want %s", err, want)
	}
}

// Addresses of all usual forms are accepted.
func TestAccepted(t *testing.T) {
	for _, address := range []string{
		"postgres://app:p%40ss%2Fw@db:6432/app?sslmode=verify-full",
		"postgresql:///app?host=/var/run/postgresql",
		"postgres://app:p:w@db/app",
		"postgres://one,two:5433/app?user=me@example.org&target_session_attrs=read-write",
		"host=db user=app password='with space' sslmode=require",
		"postgres://app@db/name%40with%2Fsigns",
	} {
		if _, err := database.Parse(address); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// Parameters with which other tools name the schema are refused, and the error names ours. Naming the schema
// twice is refused too.
func TestSchemaInAddress(t *testing.T) {
	for query, want := range map[string]string{
		"schema=flows":                            "no parameter schema; name the schema by ?options=-csearch_path%3Dname",
		"currentSchema=flows":                     "no parameter currentSchema; name the schema by ?options=-csearch_path%3Dname",
		"search_path=a&options=-csearch_path%3Db": "names the schema twice",
		"search_path=a":                           "",
		"options=-csearch_path%3Db":               "",
		"search_path=a&options=-cwork_mem%3D8MB":  "",
	} {
		config, err := database.Parse("postgres://app@db/app?" + query)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", query, err, want)
		}
		if err == nil && (database.SearchPath(config) != "") != strings.HasPrefix(query, "search_path") {
			t.Errorf("%s: it says %q", query, database.SearchPath(config))
		}
	}
}

// Whether a password may cross the network unencrypted depends on host and sslmode.
func TestPlaintext(t *testing.T) {
	for address, want := range map[string]bool{
		"postgres://127.0.0.1/app":              false,
		"postgres://localhost/app":              false,
		"postgres://[::1]/app":                  false,
		"postgres:///app?host=/run/postgresql":  false,
		"postgres://db/app":                     true, // prefer falls back
		"postgres://db/app?sslmode=disable":     true,
		"postgres://db/app?sslmode=allow":       true,
		"postgres://db/app?sslmode=require":     false,
		"postgres://localhost,db/app":           true,
		"postgres://db/app?sslmode=verify-full": false,
	} {
		config, err := database.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		if got := database.Plaintext(config); got != want {
			t.Errorf("%s: %t, want %t", address, got, want)
		}
	}
}

// Nothing is left behind in sessions that a pooler may give to others, unless the address asks for it.
func TestNothingPrepared(t *testing.T) {
	for query, want := range map[string]pgx.QueryExecMode{
		"": pgx.QueryExecModeCacheDescribe, "?default_query_exec_mode=cache_statement": pgx.QueryExecModeCacheStatement,
		"?default_query_exec_mode=exec": pgx.QueryExecModeExec,
	} {
		config, err := database.Parse("postgres://u@127.0.0.1:1/d" + query)
		if err != nil {
			t.Fatal(err)
		}
		if got := config.ConnConfig.DefaultQueryExecMode; got != want {
			t.Errorf("%q: %v, want %v", query, got, want)
		}
	}
}
