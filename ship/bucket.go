package ship

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/cove-sandbox/cove/egress/inward"
	"github.com/cove-sandbox/cove/sandbox"
)

// bucket puts each batch as one object: PREFIX/run=RUN/FROM-TO.parquet. An object
// appears whole, and a batch that comes again replaces itself.
type bucket struct {
	client       *minio.Client
	name, prefix string
	host         string
	format       sandbox.ShipFormat
	close        func()
}

// NewBucket is a sink of objects. secret is asked for at each request: it changes.
func NewBucket(k sandbox.ShipmentSink, transport *http.Transport, secret func() (string, error)) (Sink, error) {
	u, err := url.Parse(k.URL)
	if err != nil {
		return nil, sandbox.InvalidField("sink.url", "is not like https://host")
	}
	b := &bucket{host: u.Host, format: k.Format, close: transport.CloseIdleConnections}
	b.name, b.prefix, _ = strings.Cut(k.Path, "/")
	region := k.Region
	if region == "" {
		region = "us-east-1" // what servers that know no regions call theirs
	}
	b.client, err = minio.New(u.Host, &minio.Options{Creds: credentials.New(&account{k.AccessKey, secret}), Secure: u.Scheme == "https", Region: region, Transport: transport,
		BucketLookup: minio.BucketLookupPath, MaxRetries: 1})
	if err != nil {
		return nil, sandbox.InvalidField("sink.url", "is no endpoint: %v", err)
	}
	return b, nil
}

// account hands the keys to the library.
type account struct {
	id     string
	secret func() (string, error)
}

func (a *account) Retrieve() (credentials.Value, error) {
	v, err := a.secret()
	return credentials.Value{AccessKeyID: a.id, SecretAccessKey: v, SignerType: credentials.SignatureV4}, err
}

func (a *account) RetrieveWithCredContext(*credentials.CredContext) (credentials.Value, error) {
	return a.Retrieve()
}

func (a *account) IsExpired() bool { return true }

func (b *bucket) Deliver(ctx context.Context, batch Batch) error {
	content, err := encode(b.format, batch)
	if err != nil {
		return err
	}
	kind := "application/vnd.apache.parquet"
	if b.format == sandbox.JSONLines {
		kind = "application/x-ndjson"
	}
	ctx, cancel := context.WithTimeout(ctx, deliverTime)
	defer cancel()
	key := path.Join(b.prefix, "run="+batch.Run, batch.Name()+"."+string(b.format))
	_, err = b.client.PutObject(ctx, b.name, key, bytes.NewReader(content), int64(len(content)), minio.PutObjectOptions{ContentType: kind, DisableMultipart: true})
	return b.explain(err)
}

// explain says what an answer means, and nothing of what is in it but the code.
func (b *bucket) explain(err error) error {
	var own *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, inward.ErrInward):
		return inwardError(b.host)
	case errors.As(err, &own):
		return own
	}
	var answer minio.ErrorResponse
	if !errors.As(err, &answer) {
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "ship.s3", Msg: b.host + " cannot be reached", Err: err}
	}
	e := &sandbox.Error{Class: sandbox.Unavailable, Op: "ship.s3", Msg: fmt.Sprintf("%s answered %d (%.64q)", b.host, answer.StatusCode, answer.Code)}
	switch {
	case answer.StatusCode == http.StatusServiceUnavailable || answer.StatusCode == http.StatusTooManyRequests:
		e.Class = sandbox.NoCapacity
	case answer.Code == minio.NoSuchBucket:
		e.Class, e.Hint = sandbox.NotFound, "make the bucket "+b.name+" first"
	case answer.StatusCode == http.StatusForbidden || answer.StatusCode == http.StatusUnauthorized:
		e.Class, e.Hint = sandbox.Denied, "the access key, its secret, or its rights to the bucket are wrong"
	}
	return e
}

func (b *bucket) Close() error {
	b.close()
	return nil
}
