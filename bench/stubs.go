package main

import "context"

func soak(ctx context.Context, b *bench) error { return nil }
