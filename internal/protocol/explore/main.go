// Command explore visits all states of the models, and fails if a verdict is not the expected one.
//
//	go run ./internal/protocol/explore                 all variants, with the verdict of each
//	go run ./internal/protocol/explore -v 'A suspects' variants whose name contains the words, and the story of each broken one
//	go run ./internal/protocol/explore -deep           also wider bounds
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/simple-workflow/simple-workflow/internal/protocol"
)

func main() {
	verbose := flag.Bool("v", false, "tell the story that leads to each broken rule")
	deep := flag.Bool("deep", false, "wider bounds, too")
	most := flag.Int("most", 4_000_000, "give a variant up after so many states")
	memory := flag.Int("memory", 3, "GB to stay within")
	at := flag.Int("p", 2, "how many variants are explored at once")
	flag.Parse()
	debug.SetMemoryLimit(int64(*memory) << 30)
	debug.SetGCPercent(50)

	var chosen []protocol.Variant
	for _, v := range protocol.Variants(*deep) {
		if strings.Contains(v.Name, flag.Arg(0)) {
			chosen = append(chosen, v)
		}
	}
	var (
		all    sync.WaitGroup
		mu     sync.Mutex // protects the following variables, and the output
		broken int
		states int
		next   = make(chan protocol.Variant)
		start  = time.Now()
	)
	for range *at {
		all.Go(func() {
			for v := range next {
				began := time.Now()
				f := v.Explore(*most)
				mu.Lock()
				if !report(v, f, time.Since(began), *verbose) {
					broken++
				}
				states += f.States
				mu.Unlock()
			}
		})
	}
	for _, v := range chosen {
		next <- v
	}
	close(next)
	all.Wait()
	fmt.Printf("%d variants, %d states, %s; %d not as expected\n", len(chosen), states, time.Since(start).Round(time.Second), broken)
	if broken > 0 || len(chosen) == 0 {
		os.Exit(1)
	}
}

// report prints a line, and returns whether the verdict is as expected.
func report(v protocol.Variant, f protocol.Finding, took time.Duration, story bool) bool {
	verdict := "safe"
	switch {
	case f.Full:
		verdict = "gave up: too many states"
	case f.Wrong != "":
		verdict = "BROKEN: " + f.Wrong
	}
	expected := f.Wrong == v.Want && !f.Full
	if !expected {
		verdict += "   <-- unexpected"
	}
	fmt.Printf("%-62s %9d states %3d deep %6.1fs  %s\n", v.Name, f.States, f.Depth, took.Seconds(), verdict)
	if story || !expected {
		for n, what := range f.Story {
			fmt.Printf("    %2d. %s\n", n+1, what)
		}
	}
	return expected
}
