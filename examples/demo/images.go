package main

import (
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"
)

const (
	images        = 8
	width, height = 1800, 1200
	days          = 28
)

// drawImages creates the photos for the thumbnails, half of them JPEG, and the sales figures for the reports.
func (d *demo) drawImages(ctx context.Context) error {
	var drawing errgroup.Group
	drawing.SetLimit(2)
	for n := range images {
		drawing.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return writeImage(filepath.Join(d.shop(), "images"), n+1)
		})
	}
	if err := drawing.Wait(); err != nil {
		return err
	}
	for day := range days {
		if err := d.writeSales(day + 1); err != nil {
			return err
		}
	}
	return nil
}

func writeImage(dir string, n int) error {
	name := fmt.Sprintf("photo-%d.jpg", n)
	encode := func(f *os.File, m image.Image) error { return jpeg.Encode(f, m, nil) }
	if n%2 == 0 {
		name = fmt.Sprintf("photo-%d.png", n)
		encoder := png.Encoder{CompressionLevel: png.BestSpeed}
		encode = func(f *os.File, m image.Image) error { return encoder.Encode(f, m) }
	}
	file, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	return errors.Join(encode(file, landscape(n)), file.Close())
}

// landscape is a sky that changes colour, a sun, and two ranges of hills.
func landscape(n int) image.Image {
	m := image.NewRGBA(image.Rect(0, 0, width, height))
	sunX, sunY, radius := width*(n+1)/(images+3), height/3, height/8
	for x := range width {
		far := height/2 + int(100*math.Sin(float64(x)/200+float64(n)))
		near := height*2/3 + int(80*math.Sin(float64(x)/90+float64(2*n)))
		for y := range height {
			shade := uint8(255 * y / height)
			c := color.RGBA{R: shade, G: 140 + shade/4, B: 255 - shade/2, A: 255}
			switch {
			case y > near:
				c = color.RGBA{R: uint8(20 * n), G: 110 + uint8((x^y)&31), B: 60, A: 255}
			case y > far:
				c = color.RGBA{R: 90, G: 120 + uint8((x+y)&15), B: 110, A: 255}
			case (x-sunX)*(x-sunX)+(y-sunY)*(y-sunY) < radius*radius:
				c = color.RGBA{R: 255, G: 220, B: 90, A: 255}
			}
			m.SetRGBA(x, y, c)
		}
	}
	return m
}

func (d *demo) writeSales(day int) error {
	var text []byte
	for n, product := range []string{"cup", "plate", "bowl", "spoon"} {
		for hour := 8; hour < 20; hour++ {
			text = fmt.Appendf(text, "%s,%d,%d\n", product, (hour*day+n)%7+1, 250*(n+1))
		}
	}
	return os.WriteFile(filepath.Join(d.shop(), "sales", fmt.Sprintf("2026-02-%02d.csv", day)), text, 0o644)
}
