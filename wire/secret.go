package wire

import (
	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Secret leaves out the value: there is no field for it.
func Secret(s sandbox.Secret) *covev1.Secret {
	return &covev1.Secret{Name: s.Name, Hosts: s.Hosts, Header: s.Header, Format: s.Format, Url: s.URL, Body: s.Body, AllowHttp: s.AllowHTTP,
		Env: s.Env, Placeholder: s.Placeholder, Labels: s.Labels, Version: int64(max(1, s.Version)), CreatedAt: Time(s.CreatedAt), UpdatedAt: Time(s.UpdatedAt)}
}

// SecretFrom reads what a server sent.
func SecretFrom(p *covev1.Secret) sandbox.Secret {
	return sandbox.Secret{Name: p.GetName(), Hosts: p.GetHosts(), Header: p.GetHeader(), Format: p.GetFormat(), URL: p.GetUrl(), Body: p.GetBody(),
		AllowHTTP: p.GetAllowHttp(), Env: p.GetEnv(), Placeholder: p.GetPlaceholder(), Labels: p.GetLabels(), Version: int(p.GetVersion()), CreatedAt: TimeFrom(p.GetCreatedAt()), UpdatedAt: TimeFrom(p.GetUpdatedAt())}
}
