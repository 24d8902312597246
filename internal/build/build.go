// Package build says which build of the programs this is.
package build

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/simple-workflow/simple-workflow/sql"
)

// version is set by releases: -ldflags "-X …/internal/build.version=v1.2.3".
var version string

// Name returns the version, or the commit, or "devel".
func Name() string {
	info, ok := debug.ReadBuildInfo()
	switch {
	case version != "":
		return version
	case !ok:
		return "devel"
	case info.Main.Version != "" && info.Main.Version != "(devel)":
		return info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return "devel"
}

// Version returns a line for people: the version, the schema it works with, Go's version.
func Version() string {
	return fmt.Sprintf("%s (schema %d, %s %s/%s)", Name(), len(sql.Migrations()), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
