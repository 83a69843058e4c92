package server

import (
	"maps"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
)

// Operation names one thing that somebody can ask of a server, in every dialect
// of the API and in the audit log.
type Operation string

// rule is what holds for an operation, whichever dialect asks for it.
type rule struct {
	role  sandbox.Role // that a key needs at least
	scope string       // that covers it, where a key has scopes
	audit auditing     // when the audit log has it
	new   bool         // begins work that a server that is stopping would cut off: refused then
	keyed bool         // repeated with the same idempotency key, it gives what it gave
	takes quotas       // of the tenant; what it does not say here, it cannot take
}

// auditing says when the audit log has an operation. A refusal for lack of rights
// is always there. The log only grows, so nothing that code inside can have a
// client do is an entry each time.
type auditing int

const (
	never          auditing = iota // it only looks, or answers what code inside asked
	always                         // once it has ended, and a stream once it has begun
	ifRefused                      // a heartbeat comes every few seconds for days
	oncePerProcess                 // by each key: a terminal answers by itself when asked where its cursor is
	durably                        // always, and on disk before the caller is answered
)

// quotas is a set of a tenant's quotas.
type quotas uint8

const (
	sandboxQuota  quotas = 1 << iota // number, cores, memory, disk and rate of creates
	diskQuota                        // bytes of volumes and writable layers
	snapshotQuota                    // bytes of what outlives sandboxes: snapshots and recordings
	imageQuota                       // bytes of images with names of its own, and of what builds keep
)

const (
	readonly  = sandbox.ReadonlyRole
	developer = sandbox.DeveloperRole
	admin     = sandbox.AdminRole
	root      = sandbox.RootRole
)

// operations is every operation there is. One that is not here, or has no role,
// is closed to everybody: a new one stays so until somebody has thought about it.
// What an operation needs besides, by what its request names, is in scopes.go.
var operations = map[Operation]rule{
	"sandbox.create":        {role: developer, scope: "sandboxes", audit: always, new: true, keyed: true, takes: sandboxQuota | snapshotQuota},
	"sandbox.get":           {role: readonly, scope: "sandboxes"},
	"sandbox.list":          {role: readonly, scope: "sandboxes"},
	"sandbox.set_timeout":   {role: developer, scope: "sandboxes", audit: always},
	"sandbox.set_lease":     {role: developer, scope: "sandboxes", audit: always},
	"sandbox.reset":         {role: developer, scope: "sandboxes", audit: always},
	"sandbox.kill":          {role: developer, scope: "sandboxes", audit: always},
	"sandbox.kill_by_label": {role: developer, scope: "sandboxes", audit: always},
	"sandbox.diff":          {role: readonly, scope: "files"},
	"sandbox.stats":         {role: readonly, scope: "sandboxes"},
	"sandbox.pause":         {role: developer, scope: "sandboxes", audit: always},
	"sandbox.drop_memory":   {role: developer, scope: "sandboxes", audit: always},
	"sandbox.resume":        {role: developer, scope: "sandboxes", audit: always},
	"sandbox.fork":          {role: developer, scope: "sandboxes", audit: always, new: true, keyed: true, takes: sandboxQuota},
	"sandbox.restore":       {role: developer, scope: "sandboxes", audit: always, takes: diskQuota},
	"sandbox.set_network":   {role: developer, scope: "sandboxes", audit: always, takes: snapshotQuota},
	"sandbox.get_network":   {role: readonly, scope: "sandboxes"},
	"sandbox.set_secrets":   {role: developer, scope: "sandboxes", audit: always},
	"sandbox.tree":          {role: readonly, scope: "sandboxes"},

	"lease.create":    {role: developer, scope: "sandboxes", audit: always, new: true},
	"lease.heartbeat": {role: developer, scope: "sandboxes", audit: ifRefused},
	"lease.end":       {role: developer, scope: "sandboxes", audit: always},
	"lease.get":       {role: readonly, scope: "sandboxes"},
	"lease.list":      {role: readonly, scope: "sandboxes"},

	"run.create":           {role: developer, scope: "sandboxes", audit: always, new: true, keyed: true},
	"run.get":              {role: readonly, scope: "sandboxes"},
	"run.list":             {role: readonly, scope: "sandboxes"},
	"run.heartbeat":        {role: developer, scope: "sandboxes", audit: ifRefused},
	"run.end":              {role: developer, scope: "sandboxes", audit: always},
	"run.reap":             {role: developer, scope: "sandboxes", audit: always},
	"run.delete":           {role: developer, scope: "sandboxes", audit: always},
	"run.group":            {role: developer, scope: "sandboxes", audit: always, new: true, keyed: true, takes: sandboxQuota | snapshotQuota},
	"run.set_plan":         {role: developer, scope: "sandboxes", audit: always, new: true, takes: imageQuota}, // it pulls
	"run.get_plan":         {role: readonly, scope: "sandboxes"},
	"run.put_checkpoint":   {role: developer, scope: "sandboxes", audit: ifRefused}, // one a training step
	"run.get_checkpoint":   {role: readonly, scope: "sandboxes"},
	"run.list_checkpoints": {role: readonly, scope: "sandboxes"},
	"run.list_steps":       {role: readonly, scope: "processes"},
	"run.follow_steps":     {role: readonly, scope: "processes"},
	"run.replay":           {role: developer, scope: "processes", audit: always, new: true, takes: sandboxQuota | snapshotQuota},
	"run.cost":             {role: readonly, scope: "sandboxes"},

	"run.export": {role: readonly, scope: "processes"},

	// Who may say where a tenant's records go needs more: partsOfShipment.
	"shipment.create": {role: developer, scope: "shipments", audit: always, keyed: true},
	"shipment.get":    {role: readonly, scope: "shipments"},
	"shipment.list":   {role: readonly, scope: "shipments"},
	"shipment.pause":  {role: developer, scope: "shipments", audit: always},
	"shipment.resume": {role: developer, scope: "shipments", audit: always},
	"shipment.delete": {role: developer, scope: "shipments", audit: always},
	"shipment.read":   {role: readonly, scope: "shipments"},
	"shipment.ack":    {role: developer, scope: "shipments", audit: ifRefused}, // one a batch

	"grade.create":    {role: developer, scope: "grades", audit: always, new: true, keyed: true, takes: sandboxQuota | snapshotQuota},
	"grade.get":       {role: readonly, scope: "grades"},
	"grade.cancel":    {role: developer, scope: "grades", audit: always},
	"grade.wait":      {role: readonly, scope: "grades"},
	"grade.list":      {role: readonly, scope: "grades"},
	"grade.put_tests": {role: developer, scope: "grades", audit: always, new: true, keyed: true, takes: sandboxQuota | snapshotQuota},

	"process.start":       {role: developer, scope: "processes", audit: always},
	"process.exec":        {role: developer, scope: "processes", audit: always},
	"process.attach":      {role: readonly, scope: "processes"},
	"process.send_input":  {role: developer, scope: "processes", audit: oncePerProcess},
	"process.close_input": {role: developer, scope: "processes", audit: always},
	"process.signal":      {role: developer, scope: "processes", audit: always},
	"process.resize":      {role: developer, scope: "processes", audit: oncePerProcess},
	"process.list":        {role: readonly, scope: "processes"},
	"process.wait":        {role: readonly, scope: "processes"},

	"code.run":             {role: developer, scope: "processes", audit: always},
	"code.create_context":  {role: developer, scope: "processes", audit: always},
	"code.list_contexts":   {role: developer, scope: "processes"}, // it may start the interpreter
	"code.restart_context": {role: developer, scope: "processes", audit: always},
	"code.remove_context":  {role: developer, scope: "processes", audit: always},

	"file.read":           {role: readonly, scope: "files"},
	"file.write":          {role: developer, scope: "files", audit: always},
	"file.stat":           {role: readonly, scope: "files"},
	"file.list":           {role: readonly, scope: "files"},
	"file.mkdir":          {role: developer, scope: "files", audit: always},
	"file.move":           {role: developer, scope: "files", audit: always},
	"file.remove":         {role: developer, scope: "files", audit: always},
	"file.chmod":          {role: developer, scope: "files", audit: always},
	"file.chown":          {role: developer, scope: "files", audit: always},
	"file.set_attributes": {role: developer, scope: "files", audit: always},
	"file.watch":          {role: readonly, scope: "files"},
	"file.download":       {role: readonly, scope: "files"},
	"file.upload":         {role: developer, scope: "files", audit: always},
	"file.download_tar":   {role: readonly, scope: "files"},
	"file.upload_tar":     {role: developer, scope: "files", audit: always},

	"image.pull":         {role: developer, scope: "images", audit: always, new: true, takes: imageQuota},
	"image.import":       {role: developer, scope: "images", audit: always, new: true, takes: imageQuota},
	"image.build":        {role: developer, scope: "images", audit: always, new: true, takes: sandboxQuota | imageQuota},
	"image.start_build":  {role: developer, scope: "images", audit: always, new: true, takes: sandboxQuota | imageQuota},
	"image.get_build":    {role: readonly, scope: "images"},
	"image.build_events": {role: readonly, scope: "images"},
	"image.follow_build": {role: readonly, scope: "images"},
	"image.cancel_build": {role: developer, scope: "images", audit: always},
	"image.has_files":    {role: developer, scope: "images"}, // what a build copies from
	"image.put_files":    {role: developer, scope: "images", audit: always, new: true, takes: imageQuota},
	"image.push":         {role: developer, scope: "images", audit: always, new: true},
	"image.list":         {role: readonly, scope: "images"},
	"image.get":          {role: readonly, scope: "images"},
	"image.remove":       {role: developer, scope: "images", audit: always},
	"image.prune":        {role: root, scope: "images", audit: always},  // content is shared
	"image.login":        {role: admin, scope: "images", audit: always}, // all of the tenant's pulls go by it
	"image.logins":       {role: readonly, scope: "images"},
	"image.logout":       {role: admin, scope: "images", audit: always},

	"snapshot.create":       {role: developer, scope: "snapshots", audit: always, new: true, keyed: true, takes: snapshotQuota},
	"snapshot.get":          {role: readonly, scope: "snapshots"},
	"snapshot.list":         {role: readonly, scope: "snapshots"},
	"snapshot.delete":       {role: developer, scope: "snapshots", audit: always},
	"snapshot.prune":        {role: developer, scope: "snapshots", audit: always},
	"snapshot.mount":        {role: developer, scope: "snapshots", audit: always},
	"snapshot.verify":       {role: readonly, scope: "snapshots"},
	"snapshot.download_tar": {role: readonly, scope: "snapshots"},

	"template.build":  {role: developer, scope: "templates", audit: always, new: true, takes: sandboxQuota | snapshotQuota},
	"template.get":    {role: readonly, scope: "templates"},
	"template.list":   {role: readonly, scope: "templates"},
	"template.untag":  {role: developer, scope: "templates", audit: always},
	"template.tag":    {role: developer, scope: "templates", audit: always},
	"template.delete": {role: developer, scope: "templates", audit: always},

	"volume.create":      {role: developer, scope: "volumes", audit: always, takes: diskQuota},
	"volume.get":         {role: readonly, scope: "volumes"},
	"volume.list":        {role: readonly, scope: "volumes"},
	"volume.delete":      {role: developer, scope: "volumes", audit: always},
	"volume.resize":      {role: developer, scope: "volumes", audit: always, takes: diskQuota},
	"volume.clone":       {role: developer, scope: "volumes", audit: always, takes: diskQuota},
	"volume.snapshot":    {role: developer, scope: "volumes", audit: always, takes: snapshotQuota},
	"volume.list_files":  {role: readonly, scope: "volumes"},
	"volume.remove_file": {role: developer, scope: "volumes", audit: always},
	"volume.download":    {role: readonly, scope: "volumes"},
	"volume.upload":      {role: developer, scope: "volumes", audit: always},

	"recording.get":    {role: readonly, scope: "recordings"},
	"recording.list":   {role: readonly, scope: "recordings"},
	"recording.delete": {role: developer, scope: "recordings", audit: always},
	"recording.export": {role: readonly, scope: "recordings"},
	"recording.import": {role: developer, scope: "recordings", audit: always, new: true, takes: snapshotQuota},

	"port.url":        {role: developer, scope: "ports", audit: always},
	"port.set":        {role: developer, scope: "ports", audit: always},
	"port.wait_ready": {role: developer, scope: "ports", audit: always},
	"port.sign_ssh":   {role: developer, scope: "ports", audit: always},
	"port.connect":    {role: developer, scope: "ports"},

	"ssh.login":  {role: developer, scope: "ports", audit: always},
	"port.reach": {role: developer, scope: "ports"}, // through the gateway, with a key; every request of a page would be an entry

	// Who may say which hosts a secret goes to can have it sent to himself.
	"secret.create": {role: admin, scope: "secrets", audit: always},
	"secret.list":   {role: readonly, scope: "secrets"},
	"secret.update": {role: admin, scope: "secrets", audit: always},
	"secret.delete": {role: admin, scope: "secrets", audit: always},

	"callback.serve":  {role: developer, scope: "callbacks", audit: always},
	"callback.close":  {role: developer, scope: "callbacks", audit: always},
	"callback.body":   {role: developer, scope: "callbacks"},
	"callback.answer": {role: developer, scope: "callbacks"},

	"key.create": {role: admin, scope: "keys", audit: durably},
	"key.list":   {role: admin, scope: "keys"},
	"key.revoke": {role: admin, scope: "keys", audit: durably},
	"key.rotate": {role: admin, scope: "keys", audit: durably},

	"tenant.create":    {role: root, scope: "tenants", audit: durably},
	"tenant.get":       {role: readonly, scope: "tenants"},
	"tenant.list":      {role: root, scope: "tenants"},
	"tenant.set_quota": {role: root, scope: "tenants", audit: durably},
	"tenant.delete":    {role: root, scope: "tenants", audit: durably},

	"system.info":  {role: readonly, scope: "system"},
	"system.audit": {role: admin, scope: "system"},
}

// OperationNamed is for dialects: whether there is such an operation. What does
// not name one must not be served.
func OperationNamed(name string) (op Operation, known bool) {
	_, known = operations[Operation(name)]
	return Operation(name), known
}

// Operations lists them all, for the tests of dialects.
func Operations() []Operation {
	return slices.Sorted(maps.Keys(operations))
}
