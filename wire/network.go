package wire

import (
	"math"
	"strconv"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func Network(n sandbox.Network) *covev1.Network {
	if n.IsZero() {
		return nil
	}
	p := &covev1.Network{Mode: string(n.Mode)}
	for _, r := range n.Rules {
		pr := &covev1.NetworkRule{Action: string(r.Action), Cidr: r.CIDR, Domain: r.Domain, Protocol: string(r.Protocol)}
		for _, q := range r.Ports {
			pr.Ports = append(pr.Ports, &covev1.PortRange{From: uint32(q.From), To: uint32(q.To)})
		}
		p.Rules = append(p.Rules, pr)
	}
	for _, h := range n.Headers {
		p.Headers = append(p.Headers, &covev1.NetworkHeader{Domain: h.Domain, Name: h.Name, Value: h.Value})
	}
	if n.Limits != (sandbox.NetworkLimits{}) {
		p.Limits = &covev1.NetworkLimits{BytesPerSecond: n.Limits.BytesPerSecond, Connections: int32(n.Limits.Connections)}
	}
	if r := n.Record; r != nil {
		p.Record = &covev1.NetworkRecord{Id: r.ID, Name: r.Name}
	}
	if r := n.Replay; r != nil {
		p.Replay = &covev1.NetworkReplay{Recording: r.Recording, RepeatLast: r.RepeatLast, IgnoreQuery: r.IgnoreQuery, IgnoreBody: r.IgnoreBody, MatchHeaders: r.MatchHeaders}
	}
	return p
}

// NetworkFrom takes what fits the domain's types; whether it makes sense is
// package policy's to say.
func NetworkFrom(p *covev1.Network) (sandbox.Network, error) {
	n := sandbox.Network{Mode: sandbox.NetworkMode(p.GetMode()),
		Limits: sandbox.NetworkLimits{BytesPerSecond: p.GetLimits().GetBytesPerSecond(), Connections: int(p.GetLimits().GetConnections())}}
	if r := p.GetRecord(); r != nil {
		n.Record = &sandbox.NetworkRecord{ID: r.GetId(), Name: r.GetName()}
	}
	if r := p.GetReplay(); r != nil {
		n.Replay = &sandbox.NetworkReplay{Recording: r.GetRecording(), RepeatLast: r.GetRepeatLast(), IgnoreQuery: r.GetIgnoreQuery(),
			IgnoreBody: r.GetIgnoreBody(), MatchHeaders: r.GetMatchHeaders()}
	}
	for _, h := range p.GetHeaders() {
		n.Headers = append(n.Headers, sandbox.NetworkHeader{Domain: h.GetDomain(), Name: h.GetName(), Value: h.GetValue()})
	}
	for i, r := range p.GetRules() {
		sr := sandbox.NetworkRule{Action: sandbox.NetworkAction(r.GetAction()), CIDR: r.GetCidr(), Domain: r.GetDomain(), Protocol: sandbox.NetworkProtocol(r.GetProtocol())}
		for j, q := range r.GetPorts() {
			if q.GetFrom() > math.MaxUint16 || q.GetTo() > math.MaxUint16 {
				return n, sandbox.InvalidField("network.rules["+strconv.Itoa(i)+"].ports["+strconv.Itoa(j)+"]", "%d-%d; ports end at 65535", q.GetFrom(), q.GetTo())
			}
			sr.Ports = append(sr.Ports, sandbox.PortRange{From: uint16(q.GetFrom()), To: uint16(q.GetTo())})
		}
		n.Rules = append(n.Rules, sr)
	}
	return n, nil
}

func NetworkFlow(f sandbox.NetworkFlow) *covev1.NetworkFlow {
	p := &covev1.NetworkFlow{Start: Time(f.Start), End: Time(f.End), Name: utf8String(f.Name), Port: uint32(f.Port), Protocol: string(f.Protocol),
		Sent: f.Sent, Received: f.Received, Allowed: f.Allowed, Rule: int32(f.Rule), Reason: utf8String(f.Reason)}
	if f.Address.IsValid() {
		p.Address = f.Address.String()
	}
	return p
}
