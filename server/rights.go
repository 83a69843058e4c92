package server

import (
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// need is what a call asks of a key: a role at least, and the scope that covers
// it. What it asks for besides, by what it names, is in partsOf. A call that is not classified is refused, so that a new method is closed
// until somebody has thought about it.
type need struct {
	role  sandbox.Role
	scope string
}

// classes says which role a method needs, where the protos do not. A method
// without side effects is readonly's; every other one must be here.
var classes = map[string]sandbox.Role{
	"Sandboxes/Create":      sandbox.DeveloperRole,
	"Sandboxes/SetTimeout":  sandbox.DeveloperRole,
	"Sandboxes/SetLease":    sandbox.DeveloperRole,
	"Sandboxes/Reset":       sandbox.DeveloperRole,
	"Sandboxes/Kill":        sandbox.DeveloperRole,
	"Sandboxes/KillByLabel": sandbox.DeveloperRole,
	"Sandboxes/Pause":       sandbox.DeveloperRole,
	"Sandboxes/Resume":      sandbox.DeveloperRole,
	"Sandboxes/Fork":        sandbox.DeveloperRole,
	"Sandboxes/Restore":     sandbox.DeveloperRole,
	"Sandboxes/SetNetwork":  sandbox.DeveloperRole,
	"Sandboxes/SetSecrets":  sandbox.DeveloperRole,

	"Processes/Start":      sandbox.DeveloperRole,
	"Processes/Attach":     sandbox.ReadonlyRole, // reads output
	"Processes/Wait":       sandbox.ReadonlyRole,
	"Processes/SendInput":  sandbox.DeveloperRole,
	"Processes/CloseInput": sandbox.DeveloperRole,
	"Processes/Signal":     sandbox.DeveloperRole,
	"Processes/Resize":     sandbox.DeveloperRole,

	"Files/Write":  sandbox.DeveloperRole,
	"Files/Mkdir":  sandbox.DeveloperRole,
	"Files/Move":   sandbox.DeveloperRole,
	"Files/Remove": sandbox.DeveloperRole,
	"Files/Chmod":  sandbox.DeveloperRole,
	"Files/Chown":  sandbox.DeveloperRole,
	"Files/Watch":  sandbox.ReadonlyRole,

	"Images/Pull":   sandbox.DeveloperRole,
	"Images/Remove": sandbox.DeveloperRole,
	"Images/Prune":  sandbox.RootRole,  // content is shared
	"Images/Login":  sandbox.AdminRole, // all of the tenant's pulls go by it
	"Images/Logout": sandbox.AdminRole,

	"Snapshots/Create": sandbox.DeveloperRole,
	"Snapshots/Delete": sandbox.DeveloperRole,
	"Snapshots/Prune":  sandbox.DeveloperRole,
	"Snapshots/Mount":  sandbox.DeveloperRole,
	"Snapshots/Verify": sandbox.ReadonlyRole,

	"Templates/Build":  sandbox.DeveloperRole,
	"Templates/Delete": sandbox.DeveloperRole,

	"Volumes/Create":     sandbox.DeveloperRole,
	"Volumes/Delete":     sandbox.DeveloperRole,
	"Volumes/Resize":     sandbox.DeveloperRole,
	"Volumes/Clone":      sandbox.DeveloperRole,
	"Volumes/Snapshot":   sandbox.DeveloperRole,
	"Volumes/RemoveFile": sandbox.DeveloperRole,

	"Recordings/Delete": sandbox.DeveloperRole,

	"Ports/Url":       sandbox.DeveloperRole,
	"Ports/Set":       sandbox.DeveloperRole,
	"Ports/WaitReady": sandbox.DeveloperRole,
	"Ports/SignSsh":   sandbox.DeveloperRole,

	// Who may say which hosts a secret goes to can have it sent to himself.
	"Secrets/Create": sandbox.AdminRole,
	"Secrets/Update": sandbox.AdminRole,
	"Secrets/Delete": sandbox.AdminRole,

	"Leases/Create":    sandbox.DeveloperRole,
	"Leases/Heartbeat": sandbox.DeveloperRole,
	"Leases/End":       sandbox.DeveloperRole,

	"Callbacks/Serve": sandbox.DeveloperRole,
	"Callbacks/Close": sandbox.DeveloperRole,

	"Keys/Create": sandbox.AdminRole,
	"Keys/List":   sandbox.AdminRole,
	"Keys/Revoke": sandbox.AdminRole,
	"Keys/Rotate": sandbox.AdminRole,

	"Tenants/Create":   sandbox.RootRole,
	"Tenants/List":     sandbox.RootRole,
	"Tenants/SetQuota": sandbox.RootRole,
	"Tenants/Delete":   sandbox.RootRole,

	"System/Audit": sandbox.AdminRole,
}

// routeNeeds are those of the plain routes, by their pattern.
var routeNeeds = map[string]need{
	"GET /v1/sandboxes/{id}/files":                    {sandbox.ReadonlyRole, "files"},
	"PUT /v1/sandboxes/{id}/files":                    {sandbox.DeveloperRole, "files"},
	"GET /v1/sandboxes/{id}/tar":                      {sandbox.ReadonlyRole, "files"},
	"PUT /v1/sandboxes/{id}/tar":                      {sandbox.DeveloperRole, "files"},
	"POST /v1/sandboxes/{id}/exec":                    {sandbox.DeveloperRole, "processes"},
	"GET /v1/sandboxes/{id}/connect":                  {sandbox.DeveloperRole, "ports"},
	"PUT /v1/images":                                  {sandbox.DeveloperRole, "images"},
	"GET /v1/snapshots/{id}/tar":                      {sandbox.ReadonlyRole, "snapshots"},
	"GET /v1/recordings/{id}/archive":                 {sandbox.ReadonlyRole, "recordings"},
	"PUT /v1/recordings":                              {sandbox.DeveloperRole, "recordings"},
	"GET /v1/volumes/{id}/files":                      {sandbox.ReadonlyRole, "volumes"},
	"PUT /v1/volumes/{id}/files":                      {sandbox.DeveloperRole, "volumes"},
	"GET /v1/sandboxes/{id}/callbacks/{request}/body": {sandbox.DeveloperRole, "callbacks"},
	"PUT /v1/sandboxes/{id}/callbacks/{request}":      {sandbox.DeveloperRole, "callbacks"},
}

// rights is what every Connect procedure needs; those that are in the protos
// and not classified need what nobody has.
type rights struct{ procedures map[string]need }

const apiPackage = "cove.v1"

func newRights() *rights {
	r := &rights{procedures: map[string]need{}}
	protoregistry.GlobalFiles.RangeFilesByPackage(apiPackage, func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			svc := f.Services().Get(i)
			for j := range svc.Methods().Len() {
				m := svc.Methods().Get(j)
				r.procedures["/"+string(svc.FullName())+"/"+string(m.Name())] = need{classify(svc, m), scopeOf(svc)}
			}
		}
		return true
	})
	return r
}

// scopeOf is the name of a service. Leases are a matter of sandboxes and hold
// nothing else: whoever may make and end those may say when.
func scopeOf(svc protoreflect.ServiceDescriptor) string {
	if svc.Name() == "Leases" {
		return "sandboxes"
	}
	return strings.ToLower(string(svc.Name()))
}

// classify is "" for a method that nobody has thought about.
func classify(svc protoreflect.ServiceDescriptor, m protoreflect.MethodDescriptor) sandbox.Role {
	if role, ok := classes[string(svc.Name())+"/"+string(m.Name())]; ok {
		return role
	}
	if opts, ok := m.Options().(*descriptorpb.MethodOptions); ok && opts.GetIdempotencyLevel() == descriptorpb.MethodOptions_NO_SIDE_EFFECTS {
		return sandbox.ReadonlyRole
	}
	return ""
}

// changes says whether a call is more than looking: what a readonly key may do is
// none, also where the protos cannot promise that repeating it is the same.
func (r *rights) changes(spec connect.Spec) bool {
	return spec.IdempotencyLevel != connect.IdempotencyNoSideEffects && r.procedures[spec.Procedure].role != sandbox.ReadonlyRole
}

// check is for what Connect serves. Plain routes have their own check, where
// their pattern is known, and what nobody serves is said to be so.
func (r *rights) check(k store.Key, path string) error {
	n, known := r.procedures[path]
	if !known {
		return nil
	}
	return n.allows(k, strings.TrimPrefix(path, "/"+apiPackage+"."))
}

// route is a plain route behind its check.
func (r *rights) route(pattern string, audit *auditor, next http.Handler) http.Handler {
	n := routeNeeds[pattern] // of an unknown one: the role "", which nobody has
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if err := n.allows(callerOf(req.Context()).key, pattern); err != nil {
			audit.note(req.Context(), pattern, thingsOfRoute(pattern, req), err)
			wire.WriteError(w, req, sandbox.WithOp("auth", err))
			return
		}
		next.ServeHTTP(w, req)
	})
}

// allows is nil or a *sandbox.Error of its own.
func (n need) allows(k store.Key, what string) error {
	if !k.Role.AtLeast(n.role) {
		e := &sandbox.Error{Class: sandbox.Denied, Msg: what + " needs the role " + string(n.role) + "; this key has " + string(k.Role)}
		if n.role == "" {
			e.Msg = what + " is not open to anybody"
		}
		return e.WithHint("an admin of the tenant makes keys with other roles: cove key create --role")
	}
	if len(k.Scopes) > 0 && !slices.Contains(k.Scopes, n.scope) &&
		(n.role != sandbox.ReadonlyRole || !slices.Contains(k.Scopes, n.scope+":read")) {
		return &sandbox.Error{Class: sandbox.Denied, Msg: what + " is outside the scopes of this key: " + strings.Join(k.Scopes, ", "),
			Hint: "it needs " + n.wanted() + "; an admin of the tenant makes keys with other scopes: cove key create --scope"}
	}
	return nil
}

// wanted is the least scope that would do.
func (n need) wanted() string {
	if n.role == sandbox.ReadonlyRole {
		return n.scope + ":read"
	}
	return n.scope
}

// notRoot refuses a part of a call that only an installation's admin may ask for.
func notRoot(field string) error {
	return &sandbox.Error{Class: sandbox.Denied, Field: field, Msg: "only an installation's admin may"}
}
