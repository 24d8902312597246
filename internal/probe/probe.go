// Package probe serves /healthz, /readyz and /metrics for the monitoring of a process.
package probe

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/simple-workflow/simple-workflow/internal/database"
	"github.com/simple-workflow/simple-workflow/internal/env"
	"github.com/simple-workflow/simple-workflow/internal/secret"
)

// minToken is the length of the shortest accepted token.
const minToken = 16

// A Server answers over HTTP. Its answers come from memory, so frequent requests are harmless.
type Server struct {
	// Ready returns nil while the process does its work, and otherwise the reason why not.
	Ready func() error
	// Metrics is served at /metrics.
	Metrics prometheus.Gatherer
	// Token, if set, must be presented to read metrics, and the reasons in /readyz.
	Token string
	// Complete answers all requests for /complete, with any method and without Token. Nil: there is no such
	// path.
	Complete http.Handler
	// Log receives the errors of the HTTP server, at debug level.
	Log *slog.Logger
}

// Check refuses an address and a token that a Server cannot use.
func Check(report *env.Report, address, token *env.String) {
	if token.Value != "" {
		if err := checkToken(token.Value); err != nil {
			report.Refuse(token, "%s", err)
		}
	}
	if address.Value == "" {
		return
	}
	if err := checkAddress(address.Value); err != nil {
		report.Refuse(address, "%s", err)
	} else if token.Value == "" && exposed(address.Value) {
		report.Refuse(address, "others can reach that address; set %s to at least %d characters, or use 127.0.0.1", token.Name(), minToken)
	}
}

// checkAddress returns what is wrong with a listen address.
func checkAddress(address string) error {
	if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return errors.New("use host:port, such as 127.0.0.1:9090")
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		return errors.New("use a port from 0 to 65535, as in 127.0.0.1:9090")
	}
	return nil
}

// exposed reports whether other machines can reach the address.
func exposed(address string) bool {
	host, _, _ := net.SplitHostPort(address)
	return !database.Loopback(host)
}

// checkToken returns what is wrong with a token.
func checkToken(token string) error {
	switch {
	case strings.EqualFold(token, "changeme"):
		return errors.New("everybody knows that one; use a random one, for example from: openssl rand -hex 24")
	case len(token) < minToken:
		return fmt.Errorf("it has %d characters; use at least %d, for example from: openssl rand -hex 24", len(token), minToken)
	}
	if why := secret.Weak(token); why != "" {
		return errors.New(why)
	}
	return nil
}

// Serve answers requests at listener until ctx ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       30 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP at %s: %w", listener.Addr(), err)
	}
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "alive") })
	mux.HandleFunc("/readyz", s.ready)
	metrics := promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 20 * time.Second})
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, r *http.Request) {
		if !s.trusts(r) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			say(w, http.StatusUnauthorized, "a token is required: Authorization: Bearer …")
			return
		}
		metrics.ServeHTTP(w, r)
	})
	reads := onlyReads(mux)
	if s.Complete == nil {
		return reads
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/complete" {
			s.Complete.ServeHTTP(w, r)
			return
		}
		reads.ServeHTTP(w, r)
	})
}

func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	err := s.Ready()
	switch {
	case err == nil:
		say(w, http.StatusOK, "ready")
	case s.trusts(r):
		say(w, http.StatusServiceUnavailable, "not ready: "+err.Error())
	default:
		say(w, http.StatusServiceUnavailable, "not ready")
	}
}

// trusts compares hashes, so that its duration reveals nothing about the token, not even its length.
func (s *Server) trusts(r *http.Request) bool {
	if s.Token == "" {
		return true
	}
	given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	got, want := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(s.Token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && bearer
}

func onlyReads(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			say(w, http.StatusMethodNotAllowed, "only GET and HEAD")
			return
		}
		next.ServeHTTP(w, r)
	})
}

func say(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}
