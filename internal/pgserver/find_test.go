package pgserver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// BinDir returns PGTEST_BINDIR or an error, and tries no other directory.
func TestBinDirFromEnvironment(t *testing.T) {
	want, err := BinDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGTEST_BINDIR", want)
	if got, err := BinDir(); err != nil || got != want {
		t.Errorf("BinDir() = %q, %v, want %q", got, err, want)
	}
	t.Setenv("PGTEST_BINDIR", t.TempDir())
	if _, err := BinDir(); err == nil || !strings.Contains(err.Error(), "PGTEST_BINDIR") {
		t.Errorf("err = %v, want one that names PGTEST_BINDIR", err)
	}
}

// ErrNoBinaries names three remedies.
func TestRemedies(t *testing.T) {
	for _, want := range []string{"apt-get install postgresql", "make pg", "export DATABASE_URL="} {
		if !strings.Contains(ErrNoBinaries.Error(), want) {
			t.Errorf("%q is not in: %v", want, ErrNoBinaries)
		}
	}
}

// The newest version comes first, compared by number. A name without a number comes last.
func TestNewest(t *testing.T) {
	root := t.TempDir()
	for _, version := range []string{"9.6", "18", "9.5", "latest", "15"} {
		if err := os.MkdirAll(filepath.Join(root, "pg", version, "bin"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, dir := range newest(filepath.Join(root, "pg", "*", "bin")) {
		got = append(got, filepath.Base(filepath.Dir(dir)))
	}
	if want := []string{"18", "15", "9.6", "9.5", "latest"}; !slices.Equal(got, want) {
		t.Errorf("newest = %v, want %v", got, want)
	}
}

// link makes an npm package usable by creating the links it lists. It can be repeated, and cannot create a link
// outside the package.
func TestLink(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := link(root); err != nil {
		t.Errorf("a directory without a list: %v", err)
	}
	write("native/lib/libx.so.1.2", "library")
	write("native/pg-symlinks.json", `[{"source": "native/lib/libx.so.1.2", "target": "native/lib/libx.so"}]`)
	for range 2 {
		if err := link(root); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(filepath.Join(root, "native/lib/libx.so")); err != nil || string(text) != "library" {
			t.Errorf("libx.so = %q, %v", text, err)
		}
	}
	write("native/pg-symlinks.json", `[{"source": "native/lib/libx.so.1.2", "target": "../libx.so"}]`)
	if err := link(root); err == nil {
		t.Error("a link outside the package was made")
	}
}
