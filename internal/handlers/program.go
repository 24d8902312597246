package handlers

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/internal/jsondoc"
	"github.com/simple-workflow/simple-workflow/run"
)

// A program target is an executable to start.
type program struct {
	path    string
	args    []string
	env     []string // NAME=value
	dir     string
	limit   int // of stdout, in bytes
	secrets secrets
	grace   time.Duration // between SIGTERM and SIGKILL
}

// stopGrace is how long a program has to end itself once it is asked to.
const stopGrace = 5 * time.Second

const defaultPath = "PATH=/usr/local/bin:/usr/bin:/bin"

var (
	validEnv = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// Names of variables whose values are masked in errors and logs.
	secretEnv = regexp.MustCompile(`(?i)(PASS|_PWD$|SECRET|TOKEN|KEY|CREDENTIAL|AUTH|DSN|DATABASE_URL|COOKIE)`)
)

func (p *program) String() string { return "program " + p.path }

func (s *section) program() *program {
	p := &program{limit: s.number("max_result_bytes", jsondoc.MaxResult, jsondoc.MaxResult), grace: stopGrace}
	p.path = s.executable("program")
	p.dir = filepath.Dir(p.path)
	if s.settings["dir"] != nil {
		p.dir = s.folder("dir")
	}
	for _, arg := range s.list("args") {
		p.args = append(p.args, arg.value)
	}
	s.env(p)
	return p
}

func (s *section) executable(name string) string {
	path := s.text(name)
	if path == "" {
		return path
	}
	if !programsWork {
		s.bad(name, "programs can be started on Unix only; use url")
		return path
	}
	if !filepath.IsAbs(path) {
		s.bad(name, "%s is relative; write the full path, from / on", quote(path))
		return path
	}
	switch _, err := exec.LookPath(path); {
	case err == nil:
	case errors.Is(err, fs.ErrNotExist):
		s.bad(name, "%s does not exist; correct the path", quote(path))
	case errors.Is(err, fs.ErrPermission):
		s.bad(name, "%s may not be executed by the worker's user; chmod +x it", quote(path))
	default:
		s.bad(name, "%s is not a program: %v; correct the path", quote(path), errors.Unwrap(err))
	}
	return path
}

func (s *section) folder(name string) string {
	path := s.text(name)
	if path == "" {
		return path
	}
	if !filepath.IsAbs(path) {
		s.bad(name, "%s is relative; write the full path, from / on", quote(path))
	} else if info, err := os.Stat(path); err != nil || !info.IsDir() {
		s.bad(name, "%s is not a folder; create it or correct the path", quote(path))
	}
	return path
}

func (s *section) env(p *program) {
	p.env = []string{defaultPath}
	seen := map[string]bool{}
	for _, item := range s.list("env") {
		name, value, given := strings.Cut(item.value, "=")
		switch {
		case !validEnv.MatchString(name):
			// Not quoted: it may be a value whose name was forgotten.
			s.badAt(item.node, item.name, "does not start with the name of a variable; write NAME or NAME=value")
			continue
		case strings.HasPrefix(name, "WORKFLOW_") || name == "TRACEPARENT":
			s.badAt(item.node, item.name, "%s is set by the worker; remove it", quote(name))
			continue
		case seen[name]:
			s.badAt(item.node, item.name, "%s is written twice; remove one", quote(name))
			continue
		}
		seen[name] = true
		if !given {
			var ok bool
			if value, ok = s.lookup(name); !ok {
				s.badAt(item.node, item.name, "the environment variable %s is not set; set it for the worker or write %s=value", quote(name), name)
			}
		}
		if secretEnv.MatchString(name) {
			p.secrets.add(value)
		}
		p.env = append(p.env, name+"="+value) // of two, the last counts
	}
}

// environment is all that a child gets for the run.
func (p *program) environment(info run.Info, token string) []string {
	env := append(append([]string{}, p.env...),
		"WORKFLOW_RUN_ID="+info.ID.String(),
		"WORKFLOW_TYPE="+info.Type,
		"WORKFLOW_ATTEMPT="+strconv.Itoa(info.Attempt),
		"WORKFLOW_MAX_ATTEMPTS="+strconv.Itoa(info.MaxAttempts),
		"WORKFLOW_LEASE_NO="+strconv.FormatInt(info.LeaseNo, 10),
	)
	key := info.IdempotencyKey
	if key == "" {
		key = info.ID.String()
	}
	env = append(env, "WORKFLOW_IDEMPOTENCY_KEY="+key)
	if info.Tenant != "" {
		env = append(env, "WORKFLOW_TENANT="+info.Tenant)
	}
	if token != "" {
		env = append(env, "WORKFLOW_TOKEN="+token)
	}
	if info.Instance != uuid.Nil {
		env = append(env, "WORKFLOW_INSTANCE="+info.Instance.String(), "WORKFLOW_NODE="+info.Node)
		if info.BusinessKey != "" {
			env = append(env, "WORKFLOW_BUSINESS_KEY="+info.BusinessKey)
		}
	}
	if parent := traceparent(info); parent != "" {
		env = append(env, "TRACEPARENT="+parent)
	}
	return env
}
