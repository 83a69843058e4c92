package e2b

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Secrets are Cove's, without hosts: which domain one goes to, the rules of each
// sandbox say, by ${e2b.secrets.NAME} in a header. Here that becomes the secret's
// placeholder, and on the way out of the sandbox its value. A secret that has hosts
// ("cove secret set") may be named too, for those.

// secretInfo is a secret as the SDKs have it. Its id is its name.
type secretInfo struct {
	SecretID       string            `json:"secretID"`
	Name           string            `json:"name"`
	CurrentVersion int               `json:"currentVersion"`
	Metadata       map[string]string `json:"metadata"`
	CreatedAt      time.Time         `json:"createdAt"`
	UpdatedAt      time.Time         `json:"updatedAt"`
}

func secretOf(s sandbox.Secret) secretInfo {
	labels := s.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	return secretInfo{s.Name, s.Name, max(1, s.Version), labels, s.CreatedAt, s.UpdatedAt}
}

// secretName is as E2B keeps them: in small letters.
func secretName(s string) string { return strings.ToLower(s) }

func (d *dialect) createSecret(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name     string            `json:"name"`
		Value    string            `json:"value"`
		Metadata map[string]string `json:"metadata"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	made, err := d.server.CreateSecret(r.Context(), sandbox.Secret{Name: secretName(req.Name), Floating: true, Value: sandbox.NewSecretValue(req.Value), Labels: req.Metadata})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, secretOf(made))
}

func (d *dialect) updateSecret(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Value    string            `json:"value"`
		Metadata map[string]string `json:"metadata"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	value := sandbox.NewSecretValue(req.Value)
	made, err := d.server.UpdateSecret(r.Context(), secretName(r.PathValue("id")), sandbox.SecretUpdate{Value: &value, Labels: req.Metadata})
	if err != nil {
		return unnamed(err)
	}
	return writeJSON(w, http.StatusOK, secretOf(made))
}

// unnamed says of what could be no name of a secret that there is none.
func unnamed(err error) error {
	if e := sandbox.AsError(err); e.Class == sandbox.Invalid && e.Field == "name" {
		return absent(err)
	}
	return err
}

func (d *dialect) getSecret(w http.ResponseWriter, r *http.Request) error {
	all, err := d.server.ListSecrets(r.Context())
	if err != nil {
		return err
	}
	name := secretName(r.PathValue("id"))
	for _, s := range all {
		if s.Name == name {
			return writeJSON(w, http.StatusOK, secretOf(s))
		}
	}
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "no such secret"}
}

func (d *dialect) deleteSecret(w http.ResponseWriter, r *http.Request) error {
	if err := d.server.DeleteSecret(r.Context(), secretName(r.PathValue("id"))); err != nil {
		return unnamed(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// listSecrets lists by name; the token of a page is the last name of the one before.
func (d *dialect) listSecrets(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	limit := pageSize
	if s := q.Get("limit"); s != "" {
		var err error
		if limit, err = strconv.Atoi(s); err != nil || limit < 1 || limit > pageSize {
			return sandbox.InvalidField("limit", "%.20q is not accepted; 1 to %d is", s, pageSize)
		}
	}
	all, err := d.server.ListSecrets(r.Context())
	if err != nil {
		return err
	}
	out := []secretInfo{}
	for _, s := range all { // by name
		if after := q.Get("nextToken"); s.Name <= after {
			continue
		}
		if len(out) == limit {
			w.Header().Set("X-Next-Token", out[limit-1].Name)
			break
		}
		out = append(out, secretOf(s))
	}
	return writeJSON(w, http.StatusOK, out)
}

const (
	secretRef  = "${e2b.secrets."
	anyRef     = "${e2b."
	refEnd     = "}"
	rulesField = "network.rules"
)

// withSecrets puts the placeholders of secrets where headers name them, and returns
// which secrets those are.
func (d *dialect) withSecrets(ctx context.Context, headers []sandbox.NetworkHeader) (names []string, err error) {
	if !slices.ContainsFunc(headers, func(h sandbox.NetworkHeader) bool { return strings.Contains(h.Value, anyRef) }) {
		return nil, nil
	}
	all, err := d.server.ListSecrets(ctx)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for i := range headers {
		h := &headers[i]
		if h.Value, err = resolved(h.Value, h.Domain, all, used); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(used)), nil
}

// resolved is a value with placeholders for what it names.
func resolved(value, domain string, all []sandbox.Secret, used map[string]bool) (string, error) {
	var out strings.Builder
	for {
		before, rest, found := strings.Cut(value, secretRef)
		out.WriteString(before)
		if !found {
			break
		}
		name, after, closed := strings.Cut(rest, refEnd)
		i := slices.IndexFunc(all, func(s sandbox.Secret) bool { return s.Name == secretName(name) })
		switch {
		case !closed:
			return "", sandbox.InvalidField(rulesField, "a header of %s has %q without its end, %q", domain, secretRef, refEnd)
		case i < 0:
			return "", &sandbox.Error{Class: sandbox.NotFound, Field: rulesField, Msg: "no secret '" + name + "', which a header of " + domain + " names", Hint: "Secret.create makes one"}
		case !all[i].Floating && !slices.Contains(all[i].Hosts, domain):
			return "", sandbox.InvalidField(rulesField, "secret '%s' is bound to %s, and %s is none of them", name, strings.Join(all[i].Hosts, ", "), domain)
		}
		used[all[i].Name] = true
		out.WriteString(all[i].Placeholder)
		value = after
	}
	if strings.Contains(out.String(), anyRef) {
		return "", unsupported(rulesField, "workload identity (${e2b.identity…}): tokens of a vendor's cloud; a secret is named by "+secretRef+"NAME"+refEnd)
	}
	return out.String(), nil
}

// unresolved is a value as the SDKs have written it. Who may not look at secrets sees
// placeholders.
func (d *dialect) unresolved(ctx context.Context, c *networkConfig, names []string) {
	if c == nil || len(c.Rules) == 0 || len(names) == 0 {
		return
	}
	all, err := d.server.ListSecrets(ctx)
	if err != nil {
		return
	}
	for _, rules := range c.Rules {
		for _, r := range rules {
			for name, value := range r.Transform.Headers {
				for _, s := range all {
					value = strings.ReplaceAll(value, s.Placeholder, secretRef+s.Name+refEnd)
				}
				r.Transform.Headers[name] = value
			}
		}
	}
}
