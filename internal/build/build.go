// Package build identifies the build of a program.
package build

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/simple-workflow/simple-workflow/sql"
)

// version is set by release builds: -ldflags "-X …/internal/build.version=v1.2.3".
var version string

// Name returns the version, or else the commit, or else "devel".
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

// Version returns a line for people with the version, the number of the schema, and Go's version.
func Version() string {
	return fmt.Sprintf("%s (schema %d, %s %s/%s)", Name(), len(sql.Migrations()), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
