package main

import "context"

func crowd(ctx context.Context, b *bench) error     { return nil }
func mixed(ctx context.Context, b *bench) error     { return nil }
func snapshot(ctx context.Context, b *bench) error  { return nil }
func heartbeat(ctx context.Context, b *bench) error { return nil }
func soak(ctx context.Context, b *bench) error      { return nil }
