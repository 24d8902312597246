package arrows

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/compiled"
)

// layers are the files of package graph in groups, from the bottom up. A group refers only to groups below it.
var layers = []struct{ name, files string }{
	{"definitions: what an author writes, and the process it becomes",
		"names definition kind check duration expression finding flow shape compile label mistakes picture process"},
	{"the core: what an instance is, and how events move its tokens", "instance core token move join each waiting saga end fact legacy"},
	{"requests: what programs and people ask of instances", "command payload"},
	{"the shell: what reads and writes the database", "deploy engine run_type answer retry restart signal message start lock act load load_facts load_joins load_timers lasting query " +
		"write write_end write_failures write_history write_saga write_steps"},
}

// The core of package graph decides without a database: it refers to nothing that reads or writes one. Neither do
// definitions. The methods of a type are in the group of the type.
func TestSeamOfGraph(t *testing.T) {
	layer := map[string]int{"doc.go": len(layers) - 1}
	for n, l := range layers {
		for name := range strings.FieldsSeq(l.files) {
			layer[name+".go"] = n
		}
	}
	set := token.NewFileSet()
	var files []*ast.File
	names, err := filepath.Glob("../../graph/*.go")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, path := range names {
		name := filepath.Base(path)
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		there[name] = true
		if _, ok := layer[name]; !ok {
			t.Errorf("graph/%s is in no group: add it to one in %s", name, "internal/arrows/graph_test.go")
		}
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
		for _, i := range file.Imports {
			if layer[name] < 2 && (strings.Contains(i.Path.Value, "/pgx/") || strings.HasSuffix(i.Path.Value, `/lease"`) || i.Path.Value == `"context"`) {
				t.Errorf("%s imports %s: what asks the database belongs to %s", name, i.Path.Value, layers[3].name)
			}
		}
	}
	for name := range layer {
		if !there[name] {
			t.Errorf("graph/%s is in a group, and not there", name)
		}
	}

	info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	packages, err := compiled.Importer(module + "/graph")
	if err != nil {
		t.Fatal(err)
	}
	config := types.Config{Importer: packages}
	pkg, err := config.Check("graph", set, files, info)
	if err != nil {
		t.Fatal(err)
	}
	in := func(pos token.Pos) string { return filepath.Base(set.Position(pos).Filename) }
	wrong := map[string]bool{}
	for id, object := range info.Uses {
		if object.Pkg() != pkg || !object.Pos().IsValid() {
			continue
		}
		if from, to := in(id.Pos()), in(object.Pos()); layer[from] < layer[to] {
			wrong[fmt.Sprintf("%s refers to %s of %s, which belongs to %s", from, object.Name(), to, layers[layer[to]].name)] = true
		}
	}
	for id, object := range info.Defs {
		method, ok := object.(*types.Func)
		if !ok || method.Signature().Recv() == nil {
			continue
		}
		of := method.Signature().Recv().Type()
		if pointer, ok := of.(*types.Pointer); ok {
			of = pointer.Elem()
		}
		named, ok := of.(*types.Named)
		if !ok {
			continue
		}
		if from, to := in(id.Pos()), in(named.Obj().Pos()); layer[from] != layer[to] {
			wrong[fmt.Sprintf("%s has the method %s of %s, which is in %s: move it there", from, method.Name(), named.Obj().Name(), to)] = true
		}
	}
	for _, words := range slices.Sorted(maps.Keys(wrong)) {
		t.Error(words)
	}
}
