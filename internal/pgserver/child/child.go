// Package child runs helper programs, such as a database server, that neither
// outlive this process nor run as root.
//
// Each program has a watchdog: a shell that reads from a pipe only this
// process can write to. When this process ends, however abruptly, the pipe
// closes, and the watchdog ends the program and tidies up. It works on Unix.
package child

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The program inherits descriptor 3 and so does everything it starts: the
// pipe's other end reads end of file once the last of them has ended. A line
// on standard input means that the program has ended and all may stay.
const watchdog = `
last=$1 remove=$2 after=$3
shift 3
"$@" &
p=$!
echo $p >&3
exec 3>&-
if read -r _; then
	wait $p
	exit
fi
kill -$last $p 2>/dev/null
wait $p
eval "$after"
[ -z "$remove" ] || rm -rf "$remove" || { sleep 1; rm -rf "$remove"; }
`

// Command describes a program to be started.
type Command struct {
	Path string
	Args []string

	// Dir is the working directory and the program's HOME.
	Dir string

	// Remove has the watchdog remove Dir after it has ended the program.
	Remove bool

	// Last is the signal with which the watchdog ends the program. The
	// default is SIGKILL. A program started by a shell ignores SIGQUIT and
	// SIGINT unless it installs handlers of its own.
	Last syscall.Signal

	// After holds shell commands, run in Dir once the watchdog has ended the
	// program.
	After string

	// Output receives what the program writes; nil discards it.
	Output io.Writer
}

// Process is a program that was started by Start. Its methods may be called
// by one goroutine at a time.
type Process struct {
	watchdog *exec.Cmd
	word     *os.File // to the watchdog
	alive    *os.File // end of file: nothing of the program runs any more
	pid      int
	gone     bool
}

// A forgotten Process must not be collected: its pipe would close.
var running sync.Map

// Start starts the program with a clean environment. It runs as the current user, or if that is root, as the user
// that Own gives files to.
func Start(c Command) (*Process, error) {
	owner, err := owner()
	if err != nil {
		return nil, err
	}
	in, word, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	alive, holder, err := os.Pipe()
	if err != nil {
		word.Close()
		return nil, err
	}
	defer holder.Close()

	p := &Process{watchdog: c.shell(), word: word, alive: alive}
	p.watchdog.Stdin = in
	p.watchdog.ExtraFiles = []*os.File{holder}
	// A session of its own keeps the terminal's signals away.
	p.watchdog.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: owner.credential()}
	if err := p.watchdog.Start(); err != nil {
		p.close()
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	holder.Close()
	running.Store(p, nil)
	if p.pid, err = readPid(alive); err != nil {
		p.End()
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	return p, nil
}

func (c Command) shell() *exec.Cmd {
	last, remove := "9", ""
	if c.Last != 0 {
		last = strconv.Itoa(int(c.Last))
	}
	if c.Remove {
		remove = c.Dir
	}
	args := append([]string{"-c", watchdog, "sh", last, remove, c.After, c.Path}, c.Args...)
	cmd := exec.Command("/bin/sh", args...)
	cmd.Dir = c.Dir
	cmd.Env = []string{"HOME=" + c.Dir, "LC_ALL=C", "TZ=UTC", "PATH=/usr/bin:/bin:/usr/sbin:/sbin"}
	cmd.Stdout, cmd.Stderr = c.Output, c.Output
	return cmd
}

// readPid reads byte by byte, to leave the rest of the pipe alone.
func readPid(r io.Reader) (int, error) {
	var line strings.Builder
	for b := make([]byte, 1); ; line.Write(b) {
		if _, err := io.ReadFull(r, b); err != nil {
			return 0, fmt.Errorf("read its process id: %w", err)
		}
		if b[0] == '\n' {
			return strconv.Atoi(line.String())
		}
	}
}

// Pid returns the program's process id.
func (p *Process) Pid() int { return p.pid }

// Signal sends sig to the program, unless it is gone.
func (p *Process) Signal(sig syscall.Signal) {
	if !p.Gone(time.Millisecond) {
		_ = syscall.Kill(p.pid, sig) // ended just now: as good
	}
}

// Gone waits up to within for the program and every process it started to end, and reports whether they have. Zero or
// less means no limit.
func (p *Process) Gone(within time.Duration) bool {
	if p.gone {
		return true
	}
	var deadline time.Time
	if within > 0 {
		deadline = time.Now().Add(within)
	}
	if err := p.alive.SetReadDeadline(deadline); err != nil {
		return false
	}
	_, err := p.alive.Read(make([]byte, 1))
	p.gone = err == io.EOF
	return p.gone
}

// Release dismisses the watchdog of a program that is gone, and leaves its directory. The error says how the program
// ended.
func (p *Process) Release() error {
	_, _ = io.WriteString(p.word, "\n") // no reader: the watchdog was ended
	return p.wait()
}

// End ends the program if it still runs, removes its directory if the command
// said so, and returns when that is done.
func (p *Process) End() {
	p.word.Close()
	_ = p.wait()
}

func (p *Process) wait() error {
	err := p.watchdog.Wait()
	p.gone = true
	p.close()
	return err
}

func (p *Process) close() {
	running.Delete(p)
	p.word.Close()
	p.alive.Close()
}
