package main

import (
	"bytes"
	"context"
	"errors"
	"hash/fnv"
	"image"
	"image/color"
	"image/png"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/simple-workflow/simple-workflow/run"
	"github.com/simple-workflow/simple-workflow/worker"
)

type goods struct {
	Order string `json:"order"`
	Item  string `json:"item"`
}

// pack finds out that a vase is broken, but only while it packs it.
func pack(ctx context.Context, in goods) (struct{}, error) {
	if in.Item == "vase" {
		return struct{}{}, run.Permanent(run.WithCode("BROKEN", errors.New("the vase is broken")))
	}
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO order_parcel (run, order_id)
			VALUES ($1, $2)`, run.FromContext(ctx).ID, in.Order)
		return err
	})
}

func unpack(ctx context.Context, in undoing) (struct{}, error) {
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			UPDATE order_parcel
			SET unpacked = true
			WHERE run = $1`, in.Run)
		return err
	})
}

// A sticker is a label that has been printed.
type sticker struct {
	Parcel uuid.UUID `json:"parcel"`
}

// label draws the label, and files it.
func label(ctx context.Context, in goods) (sticker, error) {
	number := run.FromContext(ctx).ID
	var out bytes.Buffer
	if err := png.Encode(&out, bars(number, in.Order)); err != nil {
		return sticker{}, err
	}
	return sticker{Parcel: number}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO order_label (run, order_id, png)
			VALUES ($1, $2, $3)`, number, in.Order, out.Bytes())
		return err
	})
}

func void(ctx context.Context, in undoing) (struct{}, error) {
	return struct{}{}, worker.InSettle(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			UPDATE order_label
			SET void = true
			WHERE run = $1`, in.Run)
		return err
	})
}

// bars draws a parcel's number as bars, with wide bars for its one bits, above a pattern that differs from order to
// order.
func bars(number uuid.UUID, order string) image.Image {
	const width, height, bar = 1300, 900, 10
	m := image.NewGray(image.Rect(0, 0, width, height))
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(order))
	seed := int(sum.Sum32() % 97)
	for x := range width {
		n := (x - bar) / bar
		one := n >= 0 && n < 128 && number[n/8]>>(7-n%8)&1 == 1
		black := x%bar < 3 || one && x%bar < 7
		for y := range height {
			shade := color.Gray{Y: 255}
			switch {
			case y < height*2/3 && black:
				shade.Y = 0
			case y >= height*2/3:
				shade.Y = uint8((x*y + seed*x + y) % 251)
			}
			m.SetGray(x, y, shade)
		}
	}
	return m
}
