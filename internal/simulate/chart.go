package simulate

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// Size of the chart: 960 × 576 pixels.
const (
	chartWidth  = 10 * vg.Inch
	chartHeight = 6 * vg.Inch
	chartDPI    = 96
)

// WritePNG draws the share of requests over the objective against the number of
// routers, one line per policy with the 95 % intervals, on a logarithmic scale.
func (c *Comparison) WritePNG(w io.Writer) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%d × %s, %s arrivals, load %.2f, %s; 95 %% intervals over %d seeds", c.GPUs, c.Profile, c.Arrivals, c.Load, c.Scenario, len(c.Seeds))
	p.Title.Padding = vg.Points(6)
	p.X.Label.Text = "routers"
	p.Y.Label.Text = fmt.Sprintf("requests over %g s to first token, %%", c.SLO)
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs = vg.Points(8)
	p.Add(plotter.NewGrid())

	routers := c.RoutersOf()
	floor := c.chartFloor()
	ticks := make(plot.ConstantTicks, len(routers))
	for i, n := range routers {
		ticks[i] = plot.Tick{Value: float64(i), Label: strconv.Itoa(n)}
	}
	top := 10 * floor
	for i, policy := range c.Policies {
		line := c.lineOf(policy.Name, routers, floor)
		for k := range line.XYs {
			top = max(top, line.XYs[k].Y+line.YErrors[k].High)
		}
		if err := addLine(p, policy.Name, line, i); err != nil {
			return fmt.Errorf("draw chart: %w", err)
		}
	}
	p.X.Tick.Marker = ticks
	p.X.Min, p.X.Max = -0.25, float64(len(routers))-0.75
	p.Y.Min, p.Y.Max = floor, top*4 // room for the legend
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decades{}

	canvas := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(chartWidth, chartHeight), vgimg.UseDPI(chartDPI))}
	p.Draw(draw.New(canvas))
	if _, err := canvas.WriteTo(w); err != nil {
		return fmt.Errorf("write PNG: %w", err)
	}
	return nil
}

// decades marks powers of ten, written as plain numbers.
type decades struct{}

// Ticks implements plot.Ticker.
func (decades) Ticks(low, high float64) []plot.Tick {
	var out []plot.Tick
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for i := 1.0; i < 10; i++ {
			t := plot.Tick{Value: i * decade}
			if i == 1 {
				t.Label = strconv.FormatFloat(decade, 'g', 6, 64)
			}
			if t.Value >= low && t.Value <= high {
				out = append(out, t)
			}
		}
	}
	return out
}

// chartFloor is the lowest value drawn, in percent, a power of ten: the decade of
// the smallest share above 0, or, if there is a share of 0, the one below, on
// which it stands.
func (c *Comparison) chartFloor() float64 {
	smallest, zero := 1.0, false
	for _, r := range c.Rows {
		if r.Slow.Mean > 0 {
			smallest = min(smallest, r.Slow.Mean)
		} else {
			zero = true
		}
	}
	decade := math.Floor(math.Log10(100*smallest) + 1e-9)
	if zero {
		decade--
	}
	return math.Pow(10, decade)
}

// chartLine is one policy's line.
type chartLine struct {
	plotter.XYs
	plotter.YErrors
}

func (c *Comparison) lineOf(policy string, routers []int, floor float64) chartLine {
	var out chartLine
	for i, n := range routers {
		for _, r := range c.Rows {
			if r.Routers != n || r.Policy != policy {
				continue
			}
			y := max(floor, 100*r.Slow.Mean)
			out.XYs = append(out.XYs, plotter.XY{X: float64(i), Y: y})
			half := 100 * r.Slow.Half
			out.YErrors = append(out.YErrors, struct{ Low, High float64 }{min(half, y-floor), half})
		}
	}
	return out
}

// chartColors are told apart by most people with a colour vision deficiency
// (Okabe and Ito, 2008), with grey for the ninth.
var chartColors = []color.RGBA{
	{0x99, 0x99, 0x99, 0xff}, {0xcc, 0x79, 0xa7, 0xff}, {0x56, 0xb4, 0xe9, 0xff}, {0x00, 0x72, 0xb2, 0xff},
	{0xe6, 0x9f, 0x00, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff}, {0x00, 0x00, 0x00, 0xff}, {0xf0, 0xe4, 0x42, 0xff},
}

func addLine(p *plot.Plot, name string, line chartLine, i int) error {
	lines, points, err := plotter.NewLinePoints(line.XYs)
	if err != nil {
		return err
	}
	bars, err := plotter.NewYErrorBars(line)
	if err != nil {
		return err
	}
	shade := chartColors[i%len(chartColors)]
	lines.Color, points.Color, bars.Color = shade, shade, shade
	lines.Width = vg.Points(1.5)
	points.Shape = draw.CircleGlyph{}
	if name == Ours {
		lines.Width = vg.Points(3)
	}
	p.Add(lines, points, bars)
	p.Legend.Add(name, lines, points)
	return nil
}
