// Package handlers reads the handlers file, which assigns programs and URLs to run types, so that handlers need
// not be written in Go.
package handlers

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"unicode/utf8"

	"github.com/simple-workflow/simple-workflow/worker"
)

const maxFile = 1 << 20

// A Binding is one entry of a handlers file. Its String contains no secrets.
type Binding struct {
	Pattern string         // a type, or a prefix that ends with a dot
	Options worker.Options // fields that the file does not set are zero
	where   string         // file:line, for errors
	target  target
}

// A target is what a Binding calls. Its String contains no secrets.
type target interface {
	fmt.Stringer
	handler(log *slog.Logger) worker.Handler
}

// String returns the pattern and its target, such as "media.: program /opt/thumb.py".
func (b Binding) String() string {
	return fmt.Sprintf("%s: %v", b.Pattern, b.target)
}

// Load reads the handlers file at path. Its error has a line for each mistake, with file, line, key, value and
// remedy.
func Load(path string) ([]Binding, error) {
	data, err := read(path)
	if err != nil {
		return nil, fmt.Errorf("handlers file %q: %w", path, err)
	}
	return parse(path, data)
}

// Register adds the bindings to mux. What programs write to stderr is logged at debug level. The error names
// each binding whose pattern is registered already.
func Register(mux *worker.Mux, bindings []Binding, log *slog.Logger) error {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	var problems []error
	for _, b := range bindings {
		problems = append(problems, register(mux, b, log))
	}
	return errors.Join(problems...)
}

// register turns the panic of a mux into an error, because here the mistake is a file that clashes with the
// program's own handlers, and the author of the file should not see a stack.
func register(mux *worker.Mux, b Binding, log *slog.Logger) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: %s: %v; remove it from the file or from the program", b.where, b.Pattern, p)
		}
	}()
	mux.HandleRaw(b.Pattern, b.target.handler(log), b.Options)
	return nil
}

func read(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w; WORKER_HANDLERS names the YAML file to read", err)
	}
	// Opening a pipe would block until there is a writer, so check the mode first.
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file; WORKER_HANDLERS names the YAML file to read")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w; let the worker's user read it", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%d bytes, at most %d are read; is it the right file?", info.Size(), maxFile)
	}
	if !utf8.Valid(data) {
		return nil, errors.New("not UTF-8; save it in that encoding")
	}
	return data, nil
}
