package media_test

import (
	"context"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/simple-workflow/simple-workflow/examples/shop/media"
	"github.com/simple-workflow/simple-workflow/run"
)

// setup returns a gallery with a PNG of 400 by 300, a JPEG of 300 by 400, a text, and a link that leads outside.
func setup(t *testing.T) (*media.Gallery, string) {
	t.Helper()
	dir := t.TempDir()
	secret := filepath.Join(t.TempDir(), "secret.png")
	write(t, secret, 8, 8)
	write(t, filepath.Join(dir, "images", "wide.png"), 400, 300)
	write(t, filepath.Join(dir, "images", "sub", "high.jpg"), 300, 400)
	if err := os.WriteFile(filepath.Join(dir, "images", "text.png"), []byte("not an image"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, filepath.Join(dir, "images", "link.png")); err != nil {
		t.Fatal(err)
	}
	g, err := media.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return g, dir
}

// write draws a picture whose left half is red and whose right half is blue.
func write(t *testing.T, name string, width, height int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	picture := image.NewRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			c := color.RGBA{R: 255, A: 255}
			if x >= width/2 {
				c = color.RGBA{B: 255, A: 255}
			}
			picture.Set(x, y, c)
		}
	}
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if strings.HasSuffix(name, ".png") {
		err = png.Encode(file, picture)
	} else {
		err = jpeg.Encode(file, picture, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// handling is the context of a handler.
func handling(t *testing.T) context.Context {
	return run.NewContext(t.Context(), run.Info{ID: uuid.MustParse("01920000-0000-7000-8000-000000000001"), LeaseNo: 1})
}

// A thumbnail has the requested width, but at most the image's, and the image's proportions, format and colours.
func TestThumbnail(t *testing.T) {
	g, dir := setup(t)
	for _, test := range []struct {
		image              string
		ask, width, height int
		format, file       string
	}{
		{image: "wide.png", ask: 100, width: 100, height: 75, format: "png", file: "thumbnails/100/wide.png"},
		{image: "wide.png", ask: 33, width: 33, height: 25, format: "png", file: "thumbnails/33/wide.png"},
		{image: "wide.png", ask: 1, width: 1, height: 1, format: "png", file: "thumbnails/1/wide.png"},
		{image: "wide.png", ask: 4000, width: 400, height: 300, format: "png", file: "thumbnails/4000/wide.png"},
		{image: "sub/high.jpg", ask: 60, width: 60, height: 80, format: "jpeg", file: "thumbnails/60/sub/high.jpg"},
	} {
		got, err := g.Thumbnail(handling(t), media.Request{Image: test.image, Width: test.ask})
		if err != nil {
			t.Fatal(err)
		}
		if want := (media.Thumbnail{File: test.file, Width: test.width, Height: test.height}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		picture, format := read(t, filepath.Join(dir, test.file))
		if size := picture.Bounds().Size(); size != image.Pt(test.width, test.height) || format != test.format {
			t.Errorf("%s: the file is a %s of %v", test.file, format, size)
		}
		if test.width < 10 {
			continue
		}
		left, right := picture.At(1, 1), picture.At(test.width-2, 1)
		if r, _, b, _ := left.RGBA(); r < b {
			t.Errorf("%s: left is %v, want red", test.file, left)
		}
		if r, _, b, _ := right.RGBA(); b < r {
			t.Errorf("%s: right is %v, want blue", test.file, right)
		}
	}
}

func read(t *testing.T, name string) (image.Image, string) {
	t.Helper()
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	picture, format, err := image.Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	return picture, format
}

// Making a thumbnail again gives the same file, and leaves nothing else behind.
func TestThumbnailAgain(t *testing.T) {
	g, dir := setup(t)
	for range 2 {
		if _, err := g.Thumbnail(handling(t), media.Request{Image: "wide.png", Width: 50}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := os.ReadDir(filepath.Join(dir, "thumbnails", "50"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 1 || files[0].Name() != "wide.png" {
		t.Errorf("files = %v", files)
	}
}

// A request that no further attempt can fulfil fails for good.
func TestRefused(t *testing.T) {
	g, _ := setup(t)
	for _, r := range []media.Request{
		{Image: "../secret.png", Width: 10},
		{Image: "sub/../../secret.png", Width: 10},
		{Image: "/etc/passwd", Width: 10},
		{Image: "", Width: 10},
		{Image: ".", Width: 10},
		{Image: "text.png", Width: 10},
		{Image: "wide.png", Width: 0},
		{Image: "wide.png", Width: 5000},
	} {
		if _, err := g.Thumbnail(handling(t), r); !run.IsPermanent(err) {
			t.Errorf("%+v: err = %v, want a permanent one", r, err)
		}
	}
}

// A link that leads outside the gallery is not followed. A missing image is an ordinary error, because it may still
// arrive.
func TestNotOpened(t *testing.T) {
	g, dir := setup(t)
	for _, name := range []string{"link.png", "later.png"} {
		if _, err := g.Thumbnail(handling(t), media.Request{Image: name, Width: 4}); err == nil || run.IsPermanent(err) {
			t.Errorf("%s: err = %v, want an ordinary one", name, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "thumbnails")); !os.IsNotExist(err) {
		t.Errorf("thumbnails: %v, want %v", err, fs.ErrNotExist)
	}
}
