package docs

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// All programs accept --version, and refuse wrong arguments in the same form: exit code 2, a line for each mistake
// that begins with the program's name, and a last line that names the help.
func TestOneForm(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"worker", "dispatcher", "workflowctl"} {
		if said := run(t, program, "--version"); !strings.HasPrefix(said, program+" ") || !strings.Contains(said, "schema ") || strings.Count(said, "\n") != 1 {
			t.Errorf("%s --version: %s", program, said)
		}
		for _, args := range []string{"--nonsense", "nonsense"} {
			cmd := exec.Command(filepath.Join(bin, program), strings.Fields(args)...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			exit := (*exec.ExitError)(nil)
			if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
				t.Errorf("%s %s: %v, want exit code 2", program, args, err)
			}
			lines := strings.Split(strings.TrimSuffix(stderr.String(), "\n"), "\n")
			if stdout.Len() > 0 || len(lines) != 2 || !strings.HasPrefix(lines[0], program+": ") || !strings.Contains(lines[0], "nonsense") || lines[1] != "See "+program+" --help." {
				t.Errorf("%s %s: %s%s", program, args, stdout.String(), stderr.String())
			}
		}
	}
}
