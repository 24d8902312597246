// Package database finds out whether a database can be used: whether its address is well formed, whether it
// answers, and whether it is what the engine needs. Nothing in this package shows a password.
package database

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Example is an address for use in messages.
const Example = "postgres://app:secret@127.0.0.1:5432/app"

// ErrNoAddress means that no database address was given.
var ErrNoAddress = errors.New("set it to the database's address, such as " + Example)

var sslModes = []string{"disable", "allow", "prefer", "require", "verify-ca", "verify-full"}

// connectTimeout applies to addresses that set none.
const connectTimeout = 10 * time.Second

// Parse checks an address without connecting. Its error says what to change. Connections use no prepared
// statements, unless the address sets default_query_exec_mode, because a pooler may send each transaction to
// another session.
func Parse(address string) (*pgxpool.Config, error) {
	if err := check(address); err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(address)
	if err != nil {
		return nil, reason(err, address)
	}
	if err := checkSchema(config); err != nil {
		return nil, err
	}
	if !strings.Contains(address, "connect_timeout") {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	if !strings.Contains(address, "default_query_exec_mode") {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	return config, nil
}

// SearchPath returns a note if the address has the parameter search_path, which psql does not accept. The note
// says what to write instead.
func SearchPath(config *pgxpool.Config) string {
	if path := config.ConnConfig.RuntimeParams["search_path"]; path == "" {
		return ""
	}
	return "search_path names the schema to this program, but not to psql; " + Schema + " does so to both"
}

// Schema is how an address names a schema, for use in messages.
const Schema = "?options=-csearch_path%3Dname"

// checkSchema refuses parameters with which other tools name the schema, and an address that names it twice.
func checkSchema(config *pgxpool.Config) error {
	params := config.ConnConfig.RuntimeParams
	for _, key := range []string{"schema", "currentSchema", "current_schema"} {
		if params[key] != "" {
			return fmt.Errorf("there is no parameter %s; name the schema by %s", key, Schema)
		}
	}
	if params["search_path"] != "" && strings.Contains(params["options"], "search_path") {
		return errors.New("it names the schema twice, by search_path and by options; leave out search_path")
	}
	return nil
}

func check(address string) error {
	scheme, _, isURL := strings.Cut(address, "://")
	switch {
	case address == "":
		return ErrNoAddress
	case !isURL && !strings.Contains(address, "="):
		return errors.New("it is no address of a database; write it like " + Example)
	case !isURL:
		return checkSSLMode(pair(address, "sslmode"))
	case scheme != "postgres" && scheme != "postgresql":
		return errors.New("the scheme must be postgres or postgresql; write it like " + Example)
	}
	u, err := url.Parse(address)
	if err != nil || cutShort(address) {
		return errors.New("it cannot be read as a URL; percent-encode special characters in user and password " +
			"(@ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as %25), and give the port as a number")
	}
	return checkSSLMode(u.Query().Get("sslmode"))
}

// cutShort reports whether an @, /, ? or # in the password seems to have ended user or host too early. Then the
// rest of the password is in a part of the URL that is not masked.
func cutShort(address string) bool {
	_, rest, _ := strings.Cut(address, "://")
	end := strings.IndexAny(rest+"/", "/?#")
	authority, tail := rest[:end], rest[end:]
	path, query, _ := strings.Cut(tail, "?")
	key, _, _ := strings.Cut(query, "=")
	return strings.Count(authority, "@") > 1 || strings.Contains(path+key, "@") || strings.Contains(rest, "#")
}

func checkSSLMode(mode string) error {
	if mode == "" || slices.Contains(sslModes, mode) {
		return nil
	}
	return fmt.Errorf("sslmode %.40q is none of %s", mode, strings.Join(sslModes, ", "))
}

var pairs = regexp.MustCompile(`(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|\S*)`)

// pair returns a value of an address of the form host=… user=….
func pair(address, key string) string {
	for _, match := range pairs.FindAllStringSubmatch(address, -1) {
		if match[1] == key {
			return strings.Trim(match[2], "'")
		}
	}
	return ""
}

// reason returns what the driver says is wrong with address, unless that might quote a secret.
func reason(err error, address string) error {
	// The driver quotes the whole address before its message.
	text := err.Error()
	if _, after, quoted := strings.Cut(text, "`: "); quoted {
		text = after
	}
	for _, secret := range secrets(address) {
		if strings.Contains(text, secret) {
			return errors.New("it cannot be read; write it like " + Example)
		}
	}
	return fmt.Errorf("it cannot be used: %s", clean(text))
}

// clean replaces characters that are not printable. The driver quotes bad values verbatim, and they could
// garble a terminal.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, text)
}

func secrets(address string) []string {
	all := []string{address, pair(address, "password"), pair(address, "sslpassword")}
	if u, err := url.Parse(address); err == nil {
		password, _ := u.User.Password()
		all = append(all, password, u.Query().Get("password"), u.Query().Get("sslpassword"))
	}
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

var plainScheme = regexp.MustCompile(`^[a-z]{1,12}$`)

// Shown returns the address without secrets, for messages. It hides the parts that it cannot parse for sure.
func Shown(address string) string {
	scheme, _, _ := strings.Cut(address, "://")
	if !plainScheme.MatchString(scheme) {
		return "(hidden)"
	}
	u, err := url.Parse(address)
	if err != nil || cutShort(address) {
		return scheme + "://(hidden)"
	}
	if _, ok := u.User.Password(); ok {
		u.User = url.UserPassword(u.User.Username(), "xxxxx")
	}
	query := u.Query()
	for _, key := range []string{"password", "sslpassword"} {
		if query.Has(key) {
			query.Set(key, "xxxxx")
		}
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// Plaintext reports whether the connection may leave this machine without encryption.
func Plaintext(config *pgxpool.Config) bool {
	hosts := map[string]bool{config.ConnConfig.Host: config.ConnConfig.TLSConfig == nil}
	for _, f := range config.ConnConfig.Fallbacks {
		hosts[f.Host] = hosts[f.Host] || f.TLSConfig == nil
	}
	for host, plain := range hosts {
		if plain && !Loopback(host) {
			return true
		}
	}
	return false
}

// Loopback reports whether host is this machine: localhost, a loopback address, or the
// directory of a Unix socket.
func Loopback(host string) bool {
	if host == "localhost" || strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
