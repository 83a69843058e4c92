package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Shipment without what only a server knows.
func Shipment(s sandbox.Shipment) *covev1.Shipment {
	k := s.Sink
	p := &covev1.Shipment{Id: s.ID, Name: s.Name, Run: s.Run, MaxLag: s.MaxLag, Linger: durationpb.New(s.Linger), CreatedAt: Time(s.CreatedAt), State: "active",
		Sink: &covev1.ShipmentSink{Kind: string(k.Kind), Format: string(k.Format), Url: k.URL, Path: k.Path, Secret: k.Secret, AccessKey: k.AccessKey, Region: k.Region}}
	if s.Paused {
		p.State = "paused"
	}
	return p
}

// ShipmentSinkFrom reads what a request says.
func ShipmentSinkFrom(p *covev1.ShipmentSink) sandbox.ShipmentSink {
	return sandbox.ShipmentSink{Kind: sandbox.SinkKind(p.GetKind()), Format: sandbox.ShipFormat(p.GetFormat()), URL: p.GetUrl(), Path: p.GetPath(), Secret: p.GetSecret(),
		AccessKey: p.GetAccessKey(), Region: p.GetRegion()}
}
