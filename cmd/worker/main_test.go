package main_test

import (
	"testing"

	"github.com/simple-workflow/simple-workflow/internal/cmdtest"
)

func TestMain(m *testing.M) { cmdtest.Main(m) }
