package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func Recording(r sandbox.Recording) *covev1.Recording {
	return &covev1.Recording{Id: r.ID, Name: r.Name, Sandbox: r.Sandbox, Node: r.Node, State: string(r.State), CreatedAt: Time(r.CreatedAt),
		FinishedAt: Time(r.FinishedAt), Exchanges: r.Exchanges, Bytes: r.Bytes, Truncated: r.Truncated, Dropped: r.Dropped}
}

func RecordedExchange(e sandbox.RecordedExchange) *covev1.RecordedExchange {
	return &covev1.RecordedExchange{Number: e.Number, At: Time(e.At), Took: durationpb.New(e.Took), Method: utf8String(e.Method), Url: utf8String(e.URL),
		Status: int32(e.Status), Failed: utf8String(e.Failed), Sent: e.Sent, Received: e.Received, Truncated: e.Truncated}
}

func ReplayStatus(s sandbox.ReplayStatus) *covev1.ReplayStatus {
	p := &covev1.ReplayStatus{Recording: s.Recording, Answered: s.Answered, Missed: s.Missed, Unused: s.Unused}
	for _, m := range s.Misses {
		p.Misses = append(p.Misses, &covev1.ReplayMiss{At: Time(m.At), Method: utf8String(m.Method), Url: utf8String(m.URL), Reason: m.Reason, Hint: utf8String(m.Hint)})
	}
	return p
}
