package main

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// Pictures are plain SVG: text in the reader's font, in greys and three colours that are legible on white and on
// black.
const (
	chartWidth = 800
	textWidth  = 200 // to the right of the bars
	barHeight  = 22
	barGap     = 10
)

var chartColors = []string{"#3b82c4", "#e08a1e", "#4fa36b", "#a36bb5"}

const chartStyle = `<style>
text { font: 13px system-ui, sans-serif; fill: #57606a }
.title { font-weight: 600; font-size: 15px }
.faint { stroke: #8c959f; stroke-opacity: .35 }
.mark { stroke: #cf4a4a; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #a8b3bd } }
</style>
`

// A bar has one part for each legend, side by side.
type bar struct {
	label string
	parts []float64
	text  string // to the right of the bar
}

// bars is a chart of horizontal bars in panels, each with its own scale.
type bars struct {
	title  string
	legend []string
	panels []panel
}

type panel struct {
	title string
	bars  []bar
	mark  float64 // a line at this value; 0: none
}

func (c bars) svg() string {
	var b strings.Builder
	left := 60
	for _, p := range c.panels {
		for _, bar := range p.bars {
			left = max(left, 20+int(7.2*float64(len(bar.label))))
		}
	}
	y := 34
	if len(c.legend) > 0 {
		x := left
		for i, name := range c.legend {
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="11" height="11" fill="%s"/>`, x, y, chartColors[i])
			fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x+16, y+10, html.EscapeString(name))
			x += 40 + 8*len(name)
		}
		y += 26
	}
	for _, p := range c.panels {
		y = p.svg(&b, left, y) + 12
	}
	return frame(c.title, y, b.String())
}

// svg draws a panel with its bars from (left, y) downwards, and returns the y where it ends.
func (p panel) svg(b *strings.Builder, left, y int) int {
	if p.title != "" {
		fmt.Fprintf(b, `<text x="%d" y="%d">%s</text>`+"\n", left, y+12, html.EscapeString(p.title))
		y += 22
	}
	most := p.mark
	for _, bar := range p.bars {
		most = max(most, sum(bar.parts))
	}
	scale := float64(chartWidth-left-textWidth) / max(most, 1e-9)
	begin := y
	for i, bar := range p.bars {
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, left-10, y+16, html.EscapeString(bar.label))
		x := float64(left)
		for j, part := range bar.parts {
			color := chartColors[j]
			if len(bar.parts) == 1 && i > 0 {
				color = "#8c959f" // the first bar is ours
			}
			fmt.Fprintf(b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`, x, y, part*scale, barHeight, color)
			x += part * scale
		}
		fmt.Fprintf(b, `<text x="%.1f" y="%d">%s</text>`+"\n", x+8, y+16, html.EscapeString(bar.text))
		y += barHeight + barGap
	}
	if p.mark > 0 {
		x := float64(left) + p.mark*scale
		fmt.Fprintf(b, `<line class="mark" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`+"\n", x, x, begin-4, y-barGap+4)
	}
	return y
}

func sum(xs []float64) (total float64) {
	for _, x := range xs {
		total += x
	}
	return total
}

// A curve is drawn over time.
type curve struct {
	name   string
	points []float64 // one for each unit of time
}

// curves is a chart of values over time.
type curves struct {
	title  string
	unit   string
	tick   string // unit of time; empty: s
	curves []curve
}

func (c curves) svg() string {
	const left, right, top, height = 70, 20, 64, 240
	var b strings.Builder
	most, length := 1.0, 2
	for _, curve := range c.curves {
		length = max(length, len(curve.points))
		for _, p := range curve.points {
			most = max(most, p)
		}
	}
	step := roundStep(most / 4)
	most = math.Ceil(most/step) * step
	xAt := func(i int) float64 { return left + float64(i)*float64(chartWidth-left-right)/float64(length-1) }
	yAt := func(v float64) float64 { return top + height - v*height/most }
	for v := 0.0; v <= most; v += step {
		fmt.Fprintf(&b, `<line class="faint" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>`, left, chartWidth-right, yAt(v), yAt(v))
		fmt.Fprintf(&b, `<text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n", left-8, yAt(v)+4, thousands(v))
	}
	for s := 0; s < length; s += int(max(roundStep(float64(length)/6), 1)) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%d %s</text>`+"\n", xAt(s), top+height+20, s, cmp.Or(c.tick, "s"))
	}
	x := left
	for i, curve := range c.curves {
		fmt.Fprintf(&b, `<rect x="%d" y="36" width="11" height="11" fill="%s"/><text x="%d" y="46">%s</text>`+"\n",
			x, chartColors[i], x+16, html.EscapeString(curve.name))
		x += 40 + 8*len(curve.name)
		b.WriteString(`<polyline fill="none" stroke-width="2" stroke="` + chartColors[i] + `" points="`)
		for i, p := range curve.points {
			fmt.Fprintf(&b, "%.1f,%.1f ", xAt(i), yAt(p))
		}
		b.WriteString("\"/>\n")
	}
	return frame(c.title+", "+c.unit, top+height+32, b.String())
}

// roundStep returns the smallest of 1, 2 or 5 times a power of ten that is at least x.
func roundStep(x float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(max(x, 1e-9))))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power >= x {
			return factor * power
		}
	}
	return 10 * power
}

func frame(title string, height int, inside string) string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">
<title>%s</title>
%s<text class="title" x="10" y="20">%s</text>
%s</svg>
`, chartWidth, height, chartWidth, height, html.EscapeString(title), chartStyle, html.EscapeString(title), inside)
}

// draw writes the pictures of all sections.
func (r *results) draw(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, s := range r.Sections {
		for name, svg := range s.pictures() {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(svg), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
