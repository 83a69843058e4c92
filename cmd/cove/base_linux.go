package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/store/sqlite"
)

const baseName = "base"

// haveBase finds the image and its content.
func haveBase(ctx context.Context, db store.Images, library *image.Library) (sandbox.Image, bool, error) {
	img, err := db.GetImage(store.Installation(ctx), baseName)
	if errors.Is(err, sandbox.ErrImageNotFound) {
		return sandbox.Image{}, false, nil
	}
	return img, err == nil && library.Have(img.ID), err
}

// makeBase makes the image and names it. The fake runtime has no use for a
// Debian: its sandboxes see the host's own files.
func makeBase(ctx context.Context, c cli.ServeConfig, db store.Images, library *image.Library, progress func(sandbox.Progress)) (sandbox.Image, error) {
	var img sandbox.Image
	var err error
	if c.Runtime == "fake" {
		dir, derr := os.MkdirTemp("", "cove-base-")
		if derr != nil {
			return img, derr
		}
		defer os.Remove(dir)
		img, err = library.ImportDir(ctx, dir, sandbox.ImageConfig{}, progress)
	} else {
		img, err = library.Bootstrap(ctx, image.Debian{}, progress)
	}
	if err != nil {
		return img, err
	}
	return img, db.PutImage(store.Installation(ctx), img, baseName) // everybody's
}

// ensureBase makes the base image in the background of a server that lacks it.
func ensureBase(ctx context.Context, c cli.ServeConfig, db store.Images, library *image.Library, log *slog.Logger) {
	_, ok, err := haveBase(ctx, db, library)
	if ok {
		return
	}
	start := time.Now()
	if err == nil {
		log.Info("there is no base image yet: making it, which takes a minute or two")
		step, said := "", time.Now()
		_, err = makeBase(ctx, c, db, library, func(p sandbox.Progress) {
			if p.Step == step && time.Since(said) < 10*time.Second {
				return
			}
			step, said = p.Step, time.Now()
			log.Info("base image", "step", p.Step, "bytes", p.Done, "of", p.Total)
		})
	}
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Error("the base image could not be made; 'cove image pull' and 'cove image import' still work", "err", err)
	default:
		log.Info("the base image is ready", "took", time.Since(start).Round(time.Millisecond))
	}
}

// bootstrap is "cove image bootstrap": ensureBase without a server. Library
// and database may be shared with one that runs.
func bootstrap(ctx context.Context, c cli.ServeConfig, progress func(sandbox.Progress)) (img sandbox.Image, err error) {
	at := places{c.Data}
	if err := at.make(); err != nil {
		return img, err
	}
	db, err := sqlite.Open(ctx, at.database())
	if err != nil {
		return img, err
	}
	defer closing(&err, "store", db.Close)
	library, err := image.Open(at.images(), image.Options{})
	if err != nil {
		return img, err
	}
	defer closing(&err, "images", library.Close)
	img, ok, err := haveBase(ctx, db, library)
	if err != nil || ok && (c.Runtime == "fake" || img.Source != "debian") { // somebody gave the name to an image of theirs
		return img, err
	}
	// One of an older recipe is made anew; one of this recipe is found at once.
	made, err := makeBase(ctx, c, db, library, progress)
	if err != nil && ok && ctx.Err() == nil {
		progress(sandbox.Progress{Step: "the base image of an earlier version stays: " + err.Error()})
		return img, nil
	}
	return made, err
}
