// Package api keeps docs/api.txt, a list of everything that the packages for users export. A name that is added is a
// promise, and a name that is removed breaks users' programs, so the list shows both in every change.
package api

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/api.txt again")

// public are the packages that users import.
var public = []string{"run", "worker", "graph", "service", "outbox", "lease", "sql", "dispatcher",
	"dispatcher/lines", "dispatcher/program", "dispatcher/webhook",
	"cmd/dispatcher/amqp", "cmd/dispatcher/jetstream", "cmd/dispatcher/kafka"}

const (
	root = "../.."
	list = "../../docs/api.txt"
)

// The exports of the packages are exactly the lines of docs/api.txt.
func TestListed(t *testing.T) {
	var lines []string
	for _, name := range public {
		lines = append(lines, exported(t, name)...)
	}
	text := []byte(strings.Join(lines, "\n") + "\n")
	if *update {
		if err := os.WriteFile(list, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	listed, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(listed, text) {
		return
	}
	were := strings.Split(strings.TrimSpace(string(listed)), "\n")
	for _, line := range lines {
		if !slices.Contains(were, line) {
			t.Errorf("not listed: %s", line)
		}
	}
	for _, line := range were {
		if !slices.Contains(lines, line) {
			t.Errorf("listed, and not there: %s", line)
		}
	}
	t.Error("go test ./internal/api -update writes docs/api.txt anew")
}

// public has every package that is not internal, a program or an example.
func TestAllArePublic(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		name, _ := filepath.Rel(root, path)
		outside := []string{"bench", "torture", "site"}
		if slices.Contains(outside, name) || strings.HasPrefix(d.Name(), ".") && name != "." ||
			slices.Contains([]string{"internal", "examples", "testdata", "node_modules", "docs"}, d.Name()) {
			return filepath.SkipDir
		}
		files, _ := filepath.Glob(filepath.Join(path, "*.go"))
		if _, err := os.Stat(filepath.Join(path, "main.go")); len(files) > 0 && err != nil && !slices.Contains(public, name) {
			t.Errorf("package %s is not listed", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// internals are the exported names that may show a type of an internal package.
var internals = []string{
	"run: type DocumentError = jsondoc.Error", // its fields are listed below it
	"worker: Processes.Parts () hook.Engine",  // only package graph implements it
	"graph: func (e *Engine) Parts() hook.Engine",
}

// No exported name shows a type of an internal package, which users could not write down.
func TestNoInternalTypes(t *testing.T) {
	for _, name := range public {
		paths, _ := filepath.Glob(filepath.Join(root, name, "*.go"))
		var within []string
		for _, path := range paths {
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range file.Imports {
				if strings.Contains(i.Path.Value, "/internal/") {
					within = append(within, strings.Trim(i.Path.Value[strings.LastIndex(i.Path.Value, "/")+1:], `"`))
				}
			}
		}
		for _, line := range exported(t, name) {
			for _, base := range within {
				if regexp.MustCompile(`\b`+base+`\.[A-Z]`).MatchString(line) && !slices.Contains(internals, line) {
					t.Errorf("%s: users cannot name it", line)
				}
			}
		}
	}
}

// exported returns a line for each name that a package exports, including fields and methods.
func exported(t *testing.T, name string) (lines []string) {
	t.Helper()
	files := token.NewFileSet()
	paths, err := filepath.Glob(filepath.Join(root, name, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files of %s: %v", name, err)
	}
	add := func(form string, args ...any) { lines = append(lines, name+": "+fmt.Sprintf(form, args...)) }
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && (d.Recv == nil || ast.IsExported(receiver(d))) {
					add("%s", source(t, files, &ast.FuncDecl{Recv: d.Recv, Name: d.Name, Type: d.Type}))
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					spec(t, files, d.Tok, s, add)
				}
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines) // a name can be in files for several systems
}

func spec(t *testing.T, files *token.FileSet, kind token.Token, s ast.Spec, add func(string, ...any)) {
	switch s := s.(type) {
	case *ast.ValueSpec:
		for _, n := range s.Names {
			if n.IsExported() {
				add("%s %s", kind, n.Name)
			}
		}
	case *ast.TypeSpec:
		if !s.Name.IsExported() {
			return
		}
		of := s.Name.Name
		var members *ast.FieldList
		switch u := s.Type.(type) {
		case *ast.StructType:
			add("type %s struct", of)
			members = u.Fields
		case *ast.InterfaceType:
			add("type %s interface", of)
			members = u.Methods
		default:
			add("type %s", source(t, files, &ast.TypeSpec{Name: s.Name, TypeParams: s.TypeParams, Assign: s.Assign, Type: s.Type}))
			if other, ok := s.Type.(*ast.SelectorExpr); ok && s.Assign.IsValid() { // what it stands for is promised, too
				for _, line := range exported(t, "internal/"+source(t, files, other.X)) {
					_, line, _ = strings.Cut(line, ": ")
					if member, ok := strings.CutPrefix(line, other.Sel.Name+"."); ok {
						add("%s.%s", of, member)
					} else if strings.HasPrefix(line, "func (") && strings.Contains(line, "*"+other.Sel.Name+")") {
						add("%s", strings.Replace(line, "*"+other.Sel.Name+")", "*"+of+")", 1))
					}
				}
			}
			return
		}
		for _, f := range members.List {
			what := source(t, files, f.Type)
			if len(f.Names) == 0 {
				add("%s has %s", of, what)
			}
			for _, n := range f.Names {
				if n.IsExported() {
					add("%s.%s %s", of, n.Name, strings.TrimPrefix(what, "func"))
				}
			}
		}
	}
}

// receiver returns the name of a method's type.
func receiver(d *ast.FuncDecl) string {
	of := d.Recv.List[0].Type
	for {
		switch x := of.(type) {
		case *ast.StarExpr:
			of = x.X
		case *ast.IndexExpr:
			of = x.X
		case *ast.IndexListExpr:
			of = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

var space = regexp.MustCompile(`\s+`)

// source returns the Go source of a node on one line.
func source(t *testing.T, files *token.FileSet, node any) string {
	t.Helper()
	var text bytes.Buffer
	if spec, ok := node.(*ast.TypeSpec); ok {
		node = &ast.GenDecl{Tok: token.TYPE, Specs: []ast.Spec{spec}}
	}
	if err := format.Node(&text, files, node); err != nil {
		t.Fatal(err)
	}
	return cmp.Or(strings.TrimPrefix(space.ReplaceAllString(text.String(), " "), "type "), "?")
}
