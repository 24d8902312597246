// Package media makes thumbnails. It knows nothing about databases: its handler is a function from a request to an
// answer.
package media

import (
	"context"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"io"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/image/draw"

	"github.com/simple-workflow/simple-workflow/run"
)

const (
	maxWidth  = 4096
	maxPixels = 50_000_000 // a small file may decode to more than fits in memory
)

// A Gallery is a directory with images, and with thumbnails made from them. No name can refer to a file outside it.
type Gallery struct {
	root *os.Root
}

// Open returns the gallery in dir, which has a directory named images.
func Open(dir string) (*Gallery, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &Gallery{root}, nil
}

// A Request asks for one thumbnail.
type Request struct {
	Image string `json:"image"` // file in images, PNG or JPEG
	Width int    `json:"width"` // in pixels; the height follows
}

// A Thumbnail is the answer to a Request.
type Thumbnail struct {
	File   string `json:"file"` // in the gallery
	Width  int    `json:"width"`
	Height int    `json:"height"`
}

// Thumbnail makes a smaller copy of an image, in the image's format. Repeating it gives the same file, and nobody
// ever sees an incomplete file.
func (g *Gallery) Thumbnail(ctx context.Context, r Request) (Thumbnail, error) {
	if err := r.check(); err != nil {
		return Thumbnail{}, run.Permanent(err)
	}
	picture, format, err := g.load(path.Join("images", r.Image))
	if err != nil {
		return Thumbnail{}, fmt.Errorf("load image %q: %w", r.Image, err)
	}
	small := shrink(picture, r.Width)
	if ctx.Err() != nil {
		return Thumbnail{}, context.Cause(ctx)
	}
	file := path.Join("thumbnails", fmt.Sprint(r.Width), r.Image)
	if err := g.save(ctx, file, small, format); err != nil {
		return Thumbnail{}, fmt.Errorf("save %q: %w", file, err)
	}
	return Thumbnail{File: file, Width: small.Bounds().Dx(), Height: small.Bounds().Dy()}, nil
}

// check refuses requests that no further attempt can fulfil. The root would also stop a name that leads outside;
// check does so with a clear message, and before other directories are reached.
func (r Request) check() error {
	switch {
	case !filepath.IsLocal(r.Image) || r.Image == ".":
		return fmt.Errorf("image %q is not a file below the images", r.Image)
	case r.Width < 1 || r.Width > maxWidth:
		return fmt.Errorf("width %d is outside 1 to %d", r.Width, maxWidth)
	}
	return nil
}

func (g *Gallery) load(name string) (picture image.Image, format string, err error) {
	file, err := g.root.Open(name)
	if err != nil {
		return nil, "", err // the image may still arrive
	}
	defer file.Close()
	header, format, err := image.DecodeConfig(file)
	if err != nil {
		return nil, "", run.Permanent(err)
	}
	if header.Width*header.Height > maxPixels {
		return nil, "", run.Permanent(fmt.Errorf("%d by %d pixels are too many", header.Width, header.Height))
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, "", err
	}
	if picture, _, err = image.Decode(file); err != nil {
		return nil, "", run.Permanent(err)
	}
	return picture, format, nil
}

// shrink scales to width, but never enlarges.
func shrink(picture image.Image, width int) image.Image {
	from := picture.Bounds()
	width = min(width, from.Dx())
	height := max((from.Dy()*width+from.Dx()/2)/from.Dx(), 1)
	small := image.NewRGBA(image.Rect(0, 0, width, height))
	draw.CatmullRom.Scale(small, small.Bounds(), picture, from, draw.Src, nil)
	return small
}

// save writes a draft beside the file and renames it. Another process may still execute the same run: the lease
// number keeps the two drafts apart.
func (g *Gallery) save(ctx context.Context, name string, picture image.Image, format string) error {
	if err := g.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	info := run.FromContext(ctx)
	draft := path.Join(path.Dir(name), fmt.Sprintf(".%s-%d", info.ID, info.LeaseNo))
	file, err := g.root.Create(draft)
	if err != nil {
		return err
	}
	if err := errors.Join(encode(file, picture, format), file.Close()); err != nil {
		return errors.Join(err, g.root.Remove(draft))
	}
	return g.root.Rename(draft, name)
}

func encode(w io.Writer, picture image.Image, format string) error {
	if format == "png" {
		return png.Encode(w, picture)
	}
	return jpeg.Encode(w, picture, nil)
}
