package arrows

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// Every test that docs/promises.md names as a proof exists in the directory that it names.
func TestPromisesAreProved(t *testing.T) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(strings.TrimSpace(string(root)))
	text, err := os.ReadFile("docs/promises.md")
	if err != nil {
		t.Fatal(err)
	}
	proofs := regexp.MustCompile("`([a-z/]+)`: ((?:Test\\w+,?\\s*)+)").FindAllStringSubmatch(string(text), -1)
	if len(proofs) < 20 {
		t.Fatalf("found only %d lists of proofs", len(proofs))
	}
	for _, p := range proofs {
		for _, name := range regexp.MustCompile(`Test\w+`).FindAllString(p[2], -1) {
			out, _ := exec.Command("grep", "-lE", `^func `+name+`\(`, "-r", "--include=*_test.go", p[1]).Output()
			if len(out) == 0 {
				t.Errorf("%s is not in %s", name, p[1])
			}
		}
	}
}
