//go:build !linux

package doctor

import (
	"context"
	"errors"
)

func platform() (space func(string) (int64, int64, error), namespaces func(context.Context) error, network func() error) {
	return func(string) (int64, int64, error) { return 0, 0, errors.ErrUnsupported },
		func(context.Context) error { return errors.ErrUnsupported },
		func() error { return errors.ErrUnsupported }
}
