package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// fakeAPI is a server that remembers what it was asked and answers from
// memory. Tests set what is special about it before the first call.
type fakeAPI struct {
	killedKeys []string        // kills by idempotency key; all are of nothing
	onCreate   func()          // runs before a create
	network    *covev1.Network // last set
	secrets    []*covev1.CreateSecretRequest
	uses       *covev1.SetSecretsRequest

	url string

	// script plays a process: what Start and Attach send. Nil prints the
	// arguments and exits 0.
	script func(ctx context.Context, p *fakeProcess, attach bool, offset int64, send func(*covev1.ProcessEvent) error) error
	fail   map[string]error // by procedure, e.g. "Sandboxes/Create"

	mu        sync.Mutex
	away      int // forks and snapshots that fail first
	sandboxes []*covev1.Sandbox
	created   []*covev1.CreateSandboxRequest
	killed    []string
	processes []*covev1.Process
	started   map[string]*fakeProcess
	images    []*covev1.Image
	tenants   []*covev1.Tenant
	keys      []*covev1.Key
	madeKeys  []*covev1.CreateKeyRequest
	files     map[string]*fakeFile // by path; one sandbox's worth is enough
	tars      map[string][]byte    // uploaded, by directory
	tarOut    []byte               // what GET tar answers
	queries   []string             // of bulk calls
	listed    []*covev1.ListSandboxesRequest

	leasesEnded []string
	beats       int // of leases

	callbacks []*covev1.CallbackRequest // what Serve sends
	serves    int                       // calls of it
	answers   map[string]string         // by request
	all       chan struct{}             // closed when there are as many

	shipments fakeShipments

	fakeState
}

type fakeFile struct {
	data []byte
	info *covev1.FileInfo
}

type fakeProcess struct {
	spec    *covev1.ProcessSpec
	starts  int
	attach  []int64 // offsets
	input   chan []byte
	closed  chan struct{}
	signals chan string
	sizes   chan *covev1.TermSize
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{started: map[string]*fakeProcess{}, files: map[string]*fakeFile{}, tars: map[string][]byte{}, fail: map[string]error{}}
	mux := http.NewServeMux()
	opt := connect.WithInterceptors(f.interceptor())
	mux.Handle(covev1.NewSandboxesHandler(fakeSandboxes{f}, opt))
	mux.Handle(covev1.NewProcessesHandler(fakeProcesses{f}, opt))
	mux.Handle(covev1.NewFilesHandler(fakeFiles{fakeAPI: f}, opt))
	mux.Handle(covev1.NewImagesHandler(fakeImages{fakeAPI: f}, opt))
	mux.Handle(covev1.NewKeysHandler(fakeKeys{f}, opt))
	mux.Handle(covev1.NewSystemHandler(fakeSystem{f}, opt))
	mux.Handle(covev1.NewTenantsHandler(fakeTenants{f: f}, opt))
	mux.Handle(covev1.NewLeasesHandler(fakeLeases{api: f}, opt))
	mux.Handle(covev1.NewRunsHandler(fakeRuns{}, opt))
	mux.Handle(covev1.NewSecretsHandler(fakeSecrets{f}, opt))
	mux.HandleFunc("GET /v1/sandboxes/{id}/connect", func(w http.ResponseWriter, r *http.Request) {
		err := f.fail["connect"]
		if err == nil {
			err = sandbox.InvalidField("upgrade", "the request must be an upgrade")
		}
		wire.WriteError(w, r, err)
	})
	mux.Handle(covev1.NewCallbacksHandler(fakeCallbacks{f: f}, opt))
	mux.HandleFunc("/v1/sandboxes/{id}/callbacks/{request}/body", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "a body that follows") })
	mux.HandleFunc("PUT /v1/sandboxes/{id}/callbacks/{request}", f.answered)
	f.handleState(mux, opt)
	f.shipments.handle(mux, opt)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/v1/sandboxes/{id}/files", f.bulkFile)
	mux.HandleFunc("/v1/sandboxes/{id}/tar", f.bulkTar)
	mux.HandleFunc("PUT /v1/images", f.bulkImage)
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	f.url = srv.URL
	return f
}

// interceptor authenticates, fails what is to fail and maps errors as the real
// server does.
func (f *fakeAPI) interceptor() connect.Interceptor { return fakeInterceptor{f} }

type fakeInterceptor struct{ f *fakeAPI }

func (i fakeInterceptor) check(procedure string, h http.Header) error {
	if h.Get("Authorization") != "Bearer right" {
		return wire.ToConnect(&sandbox.Error{Class: sandbox.Unauthenticated, Msg: "wrong key"})
	}
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if err := i.f.fail[strings.TrimPrefix(procedure, "/cove.v1.")]; err != nil {
		return wire.ToConnect(err)
	}
	return nil
}

func (i fakeInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if err := i.check(r.Spec().Procedure, r.Header()); err != nil {
			return nil, err
		}
		resp, err := next(ctx, r)
		if err != nil {
			return nil, wire.ToConnect(err)
		}
		return resp, nil
	}
}
func (i fakeInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
func (i fakeInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, c connect.StreamingHandlerConn) error {
		if err := i.check(c.Spec().Procedure, c.RequestHeader()); err != nil {
			return err
		}
		if err := next(ctx, c); err != nil {
			return wire.ToConnect(err)
		}
		return nil
	}
}

// addSandbox puts a live sandbox there, an hour old.
func (f *fakeAPI) addSandbox(id string, labels map[string]string) *covev1.Sandbox {
	s := &covev1.Sandbox{
		Id: id, State: covev1.SandboxState_SANDBOX_STATE_RUNNING, Episode: 1, Node: "n1", ImageId: "sha256:abc",
		CreatedAt: timestamppb.New(time.Now().Add(-time.Hour)),
		Spec: &covev1.SandboxSpec{Image: "base", Labels: labels,
			Resources: &covev1.Resources{Cpu: 1, Memory: 512 << 20, MemoryLimit: 512 << 20, Disk: 10 << 30, Pids: 4096}},
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sandboxes = append(f.sandboxes, s)
	return s
}

func (f *fakeAPI) find(id string) (*covev1.Sandbox, error) {
	for _, s := range f.sandboxes {
		if s.GetId() == id {
			return s, nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Op: "sandbox.get", Msg: "no sandbox " + id}
}

type fakeSandboxes struct{ *fakeAPI }

func (f fakeSandboxes) Create(ctx context.Context, r *connect.Request[covev1.CreateSandboxRequest]) (*connect.Response[covev1.CreateSandboxResponse], error) {
	if f.onCreate != nil {
		f.onCreate()
	}
	f.mu.Lock()
	f.created = append(f.created, r.Msg)
	id := fmt.Sprintf("sb%d", len(f.created))
	f.mu.Unlock()
	s := f.addSandbox(id, r.Msg.GetSpec().GetLabels())
	if img := r.Msg.GetSpec().GetImage(); img != "" {
		s.Spec.Image = img
	}
	return connect.NewResponse(&covev1.CreateSandboxResponse{Sandbox: s, NodeTime: durationpb.New(3 * time.Millisecond)}), nil
}
func (f fakeSandboxes) Get(ctx context.Context, r *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.GetSandboxResponse{Sandbox: s}), nil
}
func (f fakeSandboxes) List(ctx context.Context, r *connect.Request[covev1.ListSandboxesRequest]) (*connect.Response[covev1.ListSandboxesResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listed = append(f.listed, r.Msg)
	// Pages of two, whatever is asked for, so that every caller must page.
	from := 0
	fmt.Sscan(r.Msg.GetPageToken(), &from)
	out := &covev1.ListSandboxesResponse{}
	for i, s := range f.sandboxes {
		if i < from || (s.GetEnd() != nil && len(r.Msg.GetStates()) == 0) {
			continue
		}
		if len(out.Sandboxes) == 2 {
			out.NextPageToken = fmt.Sprint(i)
			break
		}
		out.Sandboxes = append(out.Sandboxes, s)
	}
	return connect.NewResponse(out), nil
}
func (f fakeSandboxes) SetTimeout(ctx context.Context, r *connect.Request[covev1.SetTimeoutRequest]) (*connect.Response[covev1.SetTimeoutResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	s.ExpiresAt = nil
	if d := r.Msg.GetTimeout().AsDuration(); d > 0 {
		s.ExpiresAt = timestamppb.New(time.Now().Add(d))
	}
	return connect.NewResponse(&covev1.SetTimeoutResponse{Sandbox: s}), nil
}
func (f fakeSandboxes) SetLease(ctx context.Context, r *connect.Request[covev1.SetLeaseRequest]) (*connect.Response[covev1.SetLeaseResponse], error) {
	return nil, connect.NewError(connect.CodeUnimplemented, nil)
}
func (f fakeSandboxes) Reset(ctx context.Context, r *connect.Request[covev1.ResetRequest]) (*connect.Response[covev1.ResetResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	s.Episode++
	return connect.NewResponse(&covev1.ResetResponse{Sandbox: s, NodeTime: durationpb.New(2 * time.Millisecond)}), nil
}
func (f fakeSandboxes) Kill(ctx context.Context, r *connect.Request[covev1.KillRequest]) (*connect.Response[covev1.KillResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if key := r.Msg.GetIdempotencyKey(); key != "" {
		f.killedKeys = append(f.killedKeys, key)
		return nil, wire.ToConnect(sandbox.ErrNotFound)
	}
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	f.killed = append(f.killed, s.GetId())
	s.State, s.End = covev1.SandboxState_SANDBOX_STATE_ENDED, &covev1.End{Cause: "killed_by_user"}
	return connect.NewResponse(&covev1.KillResponse{Sandbox: s}), nil
}
func (f fakeSandboxes) KillByLabel(ctx context.Context, r *connect.Request[covev1.KillByLabelRequest]) (*connect.Response[covev1.KillByLabelResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &covev1.KillByLabelResponse{}
	for _, s := range f.sandboxes {
		all := true
		for k, v := range r.Msg.GetLabels() {
			all = all && s.GetSpec().GetLabels()[k] == v
		}
		if all {
			out.Ids = append(out.Ids, s.GetId())
			f.killed = append(f.killed, s.GetId())
		}
	}
	return connect.NewResponse(out), nil
}
func (f fakeSandboxes) Stats(ctx context.Context, r *connect.Request[covev1.StatsRequest]) (*connect.Response[covev1.StatsResponse], error) {
	return connect.NewResponse(&covev1.StatsResponse{CpuTime: durationpb.New(1500 * time.Millisecond), Memory: 9 << 20, MemoryPeak: 20 << 20, DiskUsed: 1 << 20, Processes: 3}), nil
}

func (f fakeSandboxes) Diff(_ context.Context, r *connect.Request[covev1.DiffRequest]) (*connect.Response[covev1.DiffResponse], error) {
	return connect.NewResponse(&covev1.DiffResponse{Since: r.Msg.Since, Added: 1, Modified: 1, Deleted: 1, Bytes: 3, Changes: []*covev1.FileChanged{
		{Path: "/a\x1b[31m", Kind: "added", Now: &covev1.FileState{Type: "file", Size: 3, Mode: 0o644}},
		{Path: "/b", Kind: "modified", What: []string{"mode"}, Before: &covev1.FileState{Type: "dir", Mode: 0o755}, Now: &covev1.FileState{Type: "dir", Mode: 0o700}},
		{Path: "/c", Kind: "deleted", Before: &covev1.FileState{Type: "symlink", Target: "d"}}}}), nil
}

type fakeProcesses struct{ *fakeAPI }

func (f fakeProcesses) Start(ctx context.Context, r *connect.Request[covev1.StartProcessRequest], s *connect.ServerStream[covev1.ProcessEvent]) error {
	spec := r.Msg.GetProcess()
	f.mu.Lock()
	p := f.started[spec.GetExecId()]
	if p == nil {
		p = &fakeProcess{spec: spec, input: make(chan []byte, 4096), closed: make(chan struct{}), signals: make(chan string, 16), sizes: make(chan *covev1.TermSize, 16)}
		f.started[spec.GetExecId()] = p
	}
	p.starts++
	f.mu.Unlock()
	return f.play(ctx, p, false, r.Msg.GetOffset(), s)
}
func (f fakeProcesses) Attach(ctx context.Context, r *connect.Request[covev1.AttachProcessRequest], s *connect.ServerStream[covev1.ProcessEvent]) error {
	f.mu.Lock()
	p := f.started[r.Msg.GetExecId()]
	if p == nil {
		p = &fakeProcess{spec: &covev1.ProcessSpec{ExecId: r.Msg.GetExecId()}}
		f.started[r.Msg.GetExecId()] = p
	}
	p.attach = append(p.attach, r.Msg.GetOffset())
	f.mu.Unlock()
	return f.play(ctx, p, true, r.Msg.GetOffset(), s)
}
func (f fakeProcesses) play(ctx context.Context, p *fakeProcess, attach bool, offset int64, s *connect.ServerStream[covev1.ProcessEvent]) error {
	if f.script != nil {
		return f.script(ctx, p, attach, offset, s.Send)
	}
	for _, ev := range []*covev1.ProcessEvent{startedEvent(p.spec.GetExecId()), outEvent(0, strings.Join(p.spec.GetArgs(), " ")+p.spec.GetCommand()+"\n"), exitEvent(0)} {
		if err := s.Send(ev); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeAPI) process(id string) (*fakeProcess, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.started[id]; p != nil {
		return p, nil
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no process"}
}
func (f fakeProcesses) SendInput(ctx context.Context, r *connect.Request[covev1.SendInputRequest]) (*connect.Response[covev1.SendInputResponse], error) {
	p, err := f.process(r.Msg.GetExecId())
	if err != nil {
		return nil, err
	}
	p.input <- r.Msg.GetData()
	return connect.NewResponse(&covev1.SendInputResponse{}), nil
}
func (f fakeProcesses) CloseInput(ctx context.Context, r *connect.Request[covev1.CloseInputRequest]) (*connect.Response[covev1.CloseInputResponse], error) {
	p, err := f.process(r.Msg.GetExecId())
	if err != nil {
		return nil, err
	}
	close(p.closed)
	return connect.NewResponse(&covev1.CloseInputResponse{}), nil
}
func (f fakeProcesses) Signal(ctx context.Context, r *connect.Request[covev1.SignalRequest]) (*connect.Response[covev1.SignalResponse], error) {
	p, err := f.process(r.Msg.GetExecId())
	if err != nil {
		return nil, err
	}
	p.signals <- r.Msg.GetSignal()
	return connect.NewResponse(&covev1.SignalResponse{}), nil
}
func (f fakeProcesses) Resize(ctx context.Context, r *connect.Request[covev1.ResizeRequest]) (*connect.Response[covev1.ResizeResponse], error) {
	p, err := f.process(r.Msg.GetExecId())
	if err != nil {
		return nil, err
	}
	p.sizes <- r.Msg.GetSize()
	return connect.NewResponse(&covev1.ResizeResponse{}), nil
}
func (f fakeProcesses) List(ctx context.Context, r *connect.Request[covev1.ListProcessesRequest]) (*connect.Response[covev1.ListProcessesResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return connect.NewResponse(&covev1.ListProcessesResponse{Processes: f.processes, Tasks: []*covev1.Task{
		{Pid: 1, Uid: 0, State: "S", Command: "init"},
		{Pid: 7, Ppid: 1, Uid: 1000, State: "R", Command: "evil \x1b]0;title\x07", ExecId: "e1"},
	}}), nil
}
func (f fakeProcesses) Wait(ctx context.Context, r *connect.Request[covev1.WaitProcessRequest]) (*connect.Response[covev1.WaitProcessResponse], error) {
	return nil, &sandbox.Error{Class: sandbox.Unsupported}
}

type fakeFiles struct {
	covev1.UnimplementedFilesHandler
	*fakeAPI
}

func (f fakeFiles) Stat(ctx context.Context, r *connect.Request[covev1.StatFileRequest]) (*connect.Response[covev1.StatFileResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	file := f.files[r.Msg.GetPath()]
	if file == nil {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no file"}
	}
	return connect.NewResponse(&covev1.StatFileResponse{Info: file.info}), nil
}

// put makes a file, a directory ("dir"), or a symlink ("symlink", data = target).
func (f *fakeAPI) put(p, kind, data string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	info := &covev1.FileInfo{Path: p, Name: path.Base(p), Type: kind, Size: int64(len(data)), Mode: 0o644}
	if kind == "symlink" {
		info.Target = data
	}
	f.files[p] = &fakeFile{data: []byte(data), info: info}
}

func (f *fakeAPI) bulkFile(w http.ResponseWriter, r *http.Request) {
	p := r.URL.Query().Get("path")
	if r.Method == http.MethodPut {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return // broken upload: nothing is kept
		}
		f.put(p, "file", string(b))
		f.mu.Lock()
		f.queries = append(f.queries, r.URL.Query().Encode())
		f.mu.Unlock()
		return
	}
	f.mu.Lock()
	file := f.files[p]
	f.mu.Unlock()
	if file == nil {
		wire.WriteError(w, r, &sandbox.Error{Class: sandbox.NotFound, Msg: "no file"})
		return
	}
	_, _ = w.Write(file.data)
}

func (f *fakeAPI) bulkTar(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPut {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.tars[r.URL.Query().Get("path")] = b
		return
	}
	_, _ = w.Write(f.tarOut)
}

func (f *fakeAPI) bulkImage(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	img := &covev1.Image{Id: "sha256:" + strings.Repeat("1", 64), Names: []string{r.URL.Query().Get("name")}, Size: int64(len(b)), Source: "tar"}
	out, _ := protojson.Marshal(img)
	_, _ = w.Write(out)
}

type fakeImages struct {
	*fakeAPI
	covev1.UnimplementedImagesHandler
}

func (f fakeImages) Login(ctx context.Context, r *connect.Request[covev1.LoginRegistryRequest]) (*connect.Response[covev1.LoginRegistryResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.LoginRegistryResponse{Login: &covev1.RegistryLogin{Registry: r.Msg.GetRegistry(), Username: r.Msg.GetUsername()}}), nil
}
func (f fakeImages) Logins(context.Context, *connect.Request[covev1.ListLoginsRequest]) (*connect.Response[covev1.ListLoginsResponse], error) {
	return connect.NewResponse(&covev1.ListLoginsResponse{Logins: []*covev1.RegistryLogin{{Registry: "ghcr.io", Username: "me", UpdatedAt: timestamppb.New(time.Now().Add(-48 * time.Hour))}}}), nil
}
func (f fakeImages) Logout(ctx context.Context, r *connect.Request[covev1.LogoutRegistryRequest]) (*connect.Response[covev1.LogoutRegistryResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.LogoutRegistryResponse{}), nil
}

func (f fakeImages) Pull(ctx context.Context, r *connect.Request[covev1.PullImageRequest], s *connect.ServerStream[covev1.PullImageEvent]) error {
	for _, ev := range []*covev1.PullImageEvent{{Step: "resolve"}, {Step: "download", Done: 5, Total: 10},
		{Step: "done", Image: &covev1.Image{Id: "sha256:" + strings.Repeat("2", 64), Names: []string{r.Msg.GetReference()}}}} {
		if err := s.Send(ev); err != nil {
			return err
		}
	}
	return nil
}
func (f fakeImages) List(ctx context.Context, r *connect.Request[covev1.ListImagesRequest]) (*connect.Response[covev1.ListImagesResponse], error) {
	return connect.NewResponse(&covev1.ListImagesResponse{Images: f.images}), nil
}
func (f fakeImages) Get(ctx context.Context, r *connect.Request[covev1.GetImageRequest]) (*connect.Response[covev1.GetImageResponse], error) {
	for _, i := range f.images {
		for _, n := range i.GetNames() {
			if n == r.Msg.GetName() {
				return connect.NewResponse(&covev1.GetImageResponse{Image: i}), nil
			}
		}
	}
	return nil, (&sandbox.Error{Class: sandbox.ImageNotFound, Msg: "no image '" + r.Msg.GetName() + "'"}).WithHint("did you mean 'base'?")
}
func (f fakeImages) Remove(ctx context.Context, r *connect.Request[covev1.RemoveImageRequest]) (*connect.Response[covev1.RemoveImageResponse], error) {
	return connect.NewResponse(&covev1.RemoveImageResponse{}), nil
}
func (f fakeImages) Prune(ctx context.Context, r *connect.Request[covev1.PruneImagesRequest]) (*connect.Response[covev1.PruneImagesResponse], error) {
	return connect.NewResponse(&covev1.PruneImagesResponse{Ids: []string{"sha256:dead"}, Bytes: 3 << 20}), nil
}

type fakeKeys struct{ *fakeAPI }

func (f fakeKeys) Create(ctx context.Context, r *connect.Request[covev1.CreateKeyRequest]) (*connect.Response[covev1.CreateKeyResponse], error) {
	f.madeKeys = append(f.madeKeys, r.Msg)
	return connect.NewResponse(&covev1.CreateKeyResponse{Key: &covev1.Key{Id: "k1", Name: r.Msg.GetName()}, Secret: "cove_secret"}), nil
}
func (f fakeKeys) List(ctx context.Context, r *connect.Request[covev1.ListKeysRequest]) (*connect.Response[covev1.ListKeysResponse], error) {
	return connect.NewResponse(&covev1.ListKeysResponse{Keys: f.keys}), nil
}
func (f fakeKeys) Rotate(ctx context.Context, r *connect.Request[covev1.RotateKeyRequest]) (*connect.Response[covev1.RotateKeyResponse], error) {
	return connect.NewResponse(&covev1.RotateKeyResponse{Key: &covev1.Key{Id: r.Msg.GetId(), OldSecretUntil: timestamppb.New(time.Now().Add(r.Msg.GetGrace().AsDuration()))}, Secret: "cove_next"}), nil
}
func (f fakeKeys) Revoke(ctx context.Context, r *connect.Request[covev1.RevokeKeyRequest]) (*connect.Response[covev1.RevokeKeyResponse], error) {
	return connect.NewResponse(&covev1.RevokeKeyResponse{}), nil
}

// fakeTenants keeps the tenants a test makes.
type fakeTenants struct {
	covev1.UnimplementedTenantsHandler
	f *fakeAPI
}

func (f fakeTenants) Create(ctx context.Context, r *connect.Request[covev1.CreateTenantRequest]) (*connect.Response[covev1.CreateTenantResponse], error) {
	tn := &covev1.Tenant{Id: "t1", Name: r.Msg.GetName(), Quota: r.Msg.GetQuota(), Labels: r.Msg.GetLabels()}
	f.f.tenants = append(f.f.tenants, tn)
	return connect.NewResponse(&covev1.CreateTenantResponse{Tenant: tn}), nil
}
func (f fakeTenants) List(ctx context.Context, r *connect.Request[covev1.ListTenantsRequest]) (*connect.Response[covev1.ListTenantsResponse], error) {
	return connect.NewResponse(&covev1.ListTenantsResponse{Tenants: f.f.tenants}), nil
}
func (f fakeTenants) Get(ctx context.Context, r *connect.Request[covev1.GetTenantRequest]) (*connect.Response[covev1.GetTenantResponse], error) {
	return connect.NewResponse(&covev1.GetTenantResponse{Tenant: &covev1.Tenant{Id: "t1", Name: r.Msg.GetName(), Quota: &covev1.Quota{Sandboxes: 5, Memory: 64 << 30}, Used: &covev1.Quota{Sandboxes: 2, Memory: 1 << 30}}}), nil
}
func (f fakeTenants) SetQuota(ctx context.Context, r *connect.Request[covev1.SetQuotaRequest]) (*connect.Response[covev1.SetQuotaResponse], error) {
	return connect.NewResponse(&covev1.SetQuotaResponse{Tenant: &covev1.Tenant{Id: "t1", Name: r.Msg.GetName(), Quota: r.Msg.GetQuota()}}), nil
}
func (f fakeTenants) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTenantRequest]) (*connect.Response[covev1.DeleteTenantResponse], error) {
	return connect.NewResponse(&covev1.DeleteTenantResponse{}), nil
}

type fakeSystem struct{ *fakeAPI }

func (f fakeSystem) Audit(ctx context.Context, r *connect.Request[covev1.AuditRequest], out *connect.ServerStream[covev1.AuditEntry]) error {
	return out.Send(&covev1.AuditEntry{Seq: 1, At: timestamppb.New(time.Unix(1700000000, 0)), Tenant: "t1", Key: "k1", KeyName: "ci", Remote: "127.0.0.1", Op: "sandbox.kill", Things: []string{"id:abc"}, Outcome: "ok", Hash: "ff"})
}

func (f fakeSystem) Info(ctx context.Context, r *connect.Request[covev1.InfoRequest]) (*connect.Response[covev1.InfoResponse], error) {
	return connect.NewResponse(&covev1.InfoResponse{Version: "v1", Runtime: "gvisor", Snapshots: &covev1.SnapshotTotals{Count: 2, Bytes: 3 << 20, AgeSeconds: 2 * 86400, Oldest: timestamppb.New(time.Now().Add(-36 * time.Hour))}, WarmKernels: 3, WarmTarget: 4,
		Total: &covev1.Capacity{Sandboxes: 2000, Cpu: 256, Memory: 8 << 30, Disk: 1 << 40}, Used: &covev1.Capacity{Sandboxes: 1, Cpu: 1, Memory: 512 << 20, Disk: 10 << 30}}), nil
}

func startedEvent(id string) *covev1.ProcessEvent {
	return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Started{Started: &covev1.ProcessStarted{ExecId: id, Pid: 42}}}
}
func outEvent(offset int64, s string) *covev1.ProcessEvent {
	return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Output{Output: &covev1.ProcessOutput{Stream: covev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: offset, Data: []byte(s)}}}
}
func errEvent(offset int64, s string) *covev1.ProcessEvent {
	ev := outEvent(offset, s)
	ev.GetOutput().Stream = covev1.OutputStream_OUTPUT_STREAM_STDERR
	return ev
}
func exitEvent(code int32) *covev1.ProcessEvent {
	return endEvent(&covev1.End{Cause: "exited", ExitCode: code})
}
func endEvent(e *covev1.End) *covev1.ProcessEvent {
	return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_End{End: &covev1.ProcessEnd{End: e}}}
}

// call is one run of the command against a fake.
type call struct {
	code           int
	stdout, stderr string
}

// settings change what a run sees of its process.
type settings struct {
	stdin io.Reader
	env   map[string]string
	sigs  chan os.Signal
	deps  func(*Deps)
}

func (f *fakeAPI) cove(t *testing.T, s settings, args ...string) call {
	t.Helper()
	var out, errs bytes.Buffer
	env := map[string]string{"COVE_URL": f.url, "COVE_KEY": "right", "COVE_DATA": t.TempDir()}
	for k, v := range s.env {
		env[k] = v
	}
	if s.stdin == nil {
		s.stdin = strings.NewReader("")
	}
	d := Deps{Version: "test", Stdin: s.stdin, Stdout: &out, Stderr: &errs, Getenv: func(k string) string { return env[k] },
		Backoff: func(int) time.Duration { return 0 },
		Notify: func(want ...os.Signal) (<-chan os.Signal, func()) {
			for _, w := range want {
				if w == os.Interrupt && s.sigs != nil {
					return s.sigs, func() {}
				}
			}
			return make(chan os.Signal), func() {}
		},
	}
	if s.deps != nil {
		s.deps(&d)
	}
	code := Main(t.Context(), d, args)
	return call{code, out.String(), errs.String()}
}

// want checks a run whole: what it printed where, and how it ended.
func (c call) want(t *testing.T, code int, stdout string, stderr ...string) {
	t.Helper()
	if c.code != code || c.stdout != stdout {
		t.Errorf("exit %d, stdout:\n%s\nwant %d:\n%s\nstderr:\n%s", c.code, c.stdout, code, stdout, c.stderr)
	}
	for _, s := range stderr {
		if !strings.Contains(c.stderr, s) {
			t.Errorf("stderr lacks %q:\n%s", s, c.stderr)
		}
	}
	if len(stderr) == 0 && c.stderr != "" {
		t.Errorf("unexpected stderr:\n%s", c.stderr)
	}
}

func sortedKeys[V any](m map[string]V) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}
