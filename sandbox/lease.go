package sandbox

import (
	"strconv"
	"time"
)

// Lease is the sign of life of a client: sandboxes made with it end when it is
// not renewed for TTL. It holds nothing but that, so that a run of a trainer
// can be a lease with a name and more.
type Lease struct {
	ID        string        `json:"id"`
	Tenant    string        `json:"tenant,omitempty"`
	Name      string        `json:"name,omitempty"` // for people: who holds it
	TTL       time.Duration `json:"ttl"`
	CreatedAt time.Time     `json:"created_at"`
	ExpiresAt time.Time     `json:"expires_at,omitzero"` // as the server knows it; no record has it
}

// Bounds of leases. Five minutes is more than any computation should hold
// Python's lock for, and little for what nobody uses any more.
const (
	DefaultLease = 5 * time.Minute
	MinLease     = time.Second
	MaxLease     = 7 * 24 * time.Hour
	MaxLeases    = 10_000 // of one tenant
)

// ValidateLease checks what a lease is asked for with.
func ValidateLease(ttl time.Duration, name string) error {
	if ttl < MinLease || ttl > MaxLease {
		return InvalidField("ttl", "%s is not accepted; %s to %s is, or none for %s", ttl, MinLease, MaxLease, DefaultLease)
	}
	if name == "" {
		return nil
	}
	return ValidateName("name", name)
}

// ExpiredEnd is how a sandbox ends whose lease was not renewed.
func (l Lease) ExpiredEnd(at time.Time) End {
	return End{Cause: LeaseExpired, At: at, Detail: l.text() + " was not renewed for " + l.TTL.String() +
		": its client is gone. A sandbox outlives its client without a lease: keep=True or sb.keep() in Python, cove create without --lease"}
}

// EndedEnd is how a sandbox ends whose lease was given back.
func (l Lease) EndedEnd(at time.Time) End {
	return End{Cause: ClientEnded, At: at, Detail: l.text() +
		" was ended by its client. A sandbox outlives its client without a lease: keep=True or sb.keep() in Python, cove create without --lease"}
}

func (l Lease) text() string {
	if l.Name == "" {
		return "lease " + l.ID
	}
	return "lease " + l.ID + " (" + strconv.Quote(l.Name) + ")"
}

// NoSuchLease is the refusal of a lease that is over or never was.
func NoSuchLease(field, id string) *Error {
	return &Error{Class: NotFound, Reason: NoLease, Field: field, Msg: "no lease '" + clip(id) + "'",
		Hint: "it was not renewed in time, or it was ended: make a new one"}
}
