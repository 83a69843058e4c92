package arch

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/cove-sandbox/cove"

// pkg is what the test needs of "go list -json".
type pkg struct {
	ImportPath   string
	Dir          string
	Name         string
	Doc          string
	GoFiles      []string
	Imports      []string
	Deps         []string
	TestImports  []string
	XTestImports []string
}

// rel is the path inside the module: "runtime/gvisor"; "" for others.
func rel(importPath string) string {
	r, ok := strings.CutPrefix(importPath, module+"/")
	if !ok || strings.HasPrefix(r, "api/") || strings.HasPrefix(r, "server/e2b/envd/") {
		return "" // api is a module of its own, made of generated code; so are the messages of E2B's agent
	}
	return r
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Dir,Name,Doc,GoFiles,Imports,Deps,TestImports,XTestImports", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		if len(p.GoFiles) > 0 {
			pkgs = append(pkgs, p)
		}
	}
	if len(pkgs) < 5 {
		t.Fatalf("go list found %d packages; the test would prove nothing", len(pkgs))
	}
	return pkgs
}

// eachFile parses the code of all packages but the module's root.
func eachFile(t *testing.T, see func(name string, fset *token.FileSet, f *ast.File)) {
	t.Helper()
	for _, p := range packages(t) {
		name := rel(p.ImportPath)
		if name == "" {
			continue
		}
		for _, file := range p.GoFiles {
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, file), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			see(name, fset, f)
		}
	}
}

// below says whether a package is one of the tree named, or in it.
func below(p string, trees ...string) bool {
	for _, tree := range trees {
		if p == tree || strings.HasPrefix(p, tree+"/") {
			return true
		}
	}
	return false
}

// everyTree is all that is built on the domain.
var everyTree = []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire", "volume", "egress", "gateway", "pki", "quota", "grade", "cas", "snapshot"}

// rules are the arrows of the design. from may not reach any of to, directly
// or through others.
var rules = []struct {
	from, to []string
	why      string
}{
	{[]string{"scheduler"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli"},
		"the scheduler is pure: state in, plan out"},
	{[]string{"runtime", "guest"}, []string{"server", "store", "node", "volume", "cli", "scheduler"},
		"a driver and the guest know nothing of who uses them"},
	{[]string{"store"}, []string{"server", "node", "runtime", "guest", "image", "cli"},
		"the record knows only the domain"},
	{[]string{"quota", "pki", "grade"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire", "volume"},
		"what may be had, and who is who, is decided from the domain alone"},
	{[]string{"cas", "snapshot"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire"},
		"stored state outlives whoever wrote it, and knows only the domain"},
	{[]string{"steplog"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire", "volume", "cas", "snapshot"},
		"a log of records knows nothing of what they say"},
	{[]string{"ship"}, []string{"server", "node", "store", "steplog", "runtime", "guest", "image", "cli", "wire", "volume", "cas", "snapshot"},
		"a sink takes batches; where they come from is not its to know"},
	{[]string{"cas"}, []string{"snapshot"},
		"blobs do not know what is in them"},
	{[]string{"image"}, []string{"server", "node", "store", "guest", "cli"},
		"the library makes content; names are the store's"},
	{[]string{"build"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire", "volume", "cas", "snapshot"},
		"a build is planned from text and configs alone"},
	{[]string{"volume"}, []string{"server", "node", "store", "runtime", "guest", "image", "cli", "wire"},
		"volumes are directories of the host; who mounts them is not theirs to know"},
	{[]string{"egress"}, []string{"server", "node", "store", "runtime", "guest", "image", "volume", "cli", "wire", "cas", "snapshot"},
		"networks know sandboxes by an id and a policy, nothing more"},
	{[]string{"egress/policy"}, []string{"egress/netns", "egress/proxy"},
		"policy is pure: what is asked for and a flow in, a verdict out"},
	{[]string{"wire"}, []string{"server", "node", "store", "runtime", "image", "volume", "cli"},
		"wire is shared by both sides of the network"},
	{[]string{"node"}, []string{"server", "store", "cli", "wire", "image"},
		"a node must be able to live in a process of its own"},
	{[]string{"server"}, []string{"node/agent", "node/remote", "guest", "cli", "image", "runtime", "volume"},
		"the server sees nodes through the contract in node, so that they can be elsewhere"},
	{[]string{"node/remote"}, []string{"node/agent", "runtime", "guest", "volume"},
		"whoever calls a node in another process needs nothing of what runs there"},
	{[]string{"gateway"}, []string{"server", "node", "store", "runtime", "guest", "image", "volume", "cli", "wire"},
		"the gateway sees sandboxes through gateway.Backend"},
	{[]string{"server"}, []string{"gateway"},
		"the server is shown to the gateway, not the other way round"},
	{[]string{"cli"}, []string{"gateway", "server", "node", "store", "runtime", "image", "guest", "volume"},
		"the client speaks HTTP; what runs on the server's machine is handed in by cmd"},
	{[]string{"internal/durable", "internal/notify", "internal/seal", "internal/untar"}, everyTree,
		"a home of one idea knows at most the domain, so that anybody may use it"},
	{[]string{"cmd/cove-guest"}, []string{"server", "node", "store", "image", "cli", "wire", "runtime"},
		"the guest is small and runs beside hostile code"},
}

func TestImportsFollowTheDesign(t *testing.T) {
	pkgs := packages(t)
	for _, p := range pkgs {
		name := rel(p.ImportPath)
		if name == "" {
			continue
		}
		if below(name, "sandbox") {
			for _, dep := range p.Deps {
				if strings.HasPrefix(dep, module) && !below(rel(dep), "sandbox") {
					t.Errorf("%s imports %s: the domain imports nothing of ours", name, dep)
				}
			}
		}
		for _, r := range rules {
			if !below(name, r.from...) {
				continue
			}
			for _, dep := range p.Deps {
				if d := rel(dep); d != "" && below(d, r.to...) && !below(d, r.from...) {
					t.Errorf("%s reaches %s: %s", name, d, r.why)
				}
			}
		}
		if name == "node" {
			for _, dep := range p.Deps {
				if d := rel(dep); d != "" && !below(d, "sandbox", "snapshot", "cas", "node") && !below(d, "internal") || below(d, "node/agent", "node/remote") {
					t.Errorf("the contract of a node reaches %s: it is values of the domain", d)
				}
			}
		}
		// Tests may put the two together; programs are put together in cmd.
		var hasServer, hasNode bool
		for _, imp := range p.Imports {
			hasServer = hasServer || rel(imp) == "server"
			hasNode = hasNode || rel(imp) == "node/agent"
		}
		if hasServer && hasNode && !below(name, "cmd", "e2e") {
			t.Errorf("%s imports both server and node: only cmd may", name)
		}
	}
}

// Operations are in domain types: what a dialect speaks stops at its own package,
// and so another dialect needs nothing of this one.
func TestOperationsKnowNoWire(t *testing.T) {
	dialects := 0
	for _, p := range packages(t) {
		name := rel(p.ImportPath)
		if below(name, "server") && name != "server" {
			dialects++
		}
		if name != "server" {
			continue
		}
		for _, dep := range p.Deps {
			if dep == "connectrpc.com/connect" || rel(dep) == "wire" || strings.HasPrefix(dep, module+"/api") {
				t.Errorf("server reaches %s: only dialects below it may", dep)
			}
		}
	}
	if dialects == 0 {
		t.Error("there is no dialect; the test would prove nothing")
	}
}

// The rules must bite: a tree that is renamed would otherwise leave a rule
// that matches nothing.
func TestRulesNameRealPackages(t *testing.T) {
	have := map[string]bool{}
	for _, p := range packages(t) {
		have[rel(p.ImportPath)] = true
	}
	later := map[string]bool{"scheduler": true} // in the design, not built yet
	for _, r := range rules {
		for _, tree := range append(append([]string{}, r.from...), r.to...) {
			found := later[tree]
			for name := range have {
				found = found || below(name, tree)
			}
			if !found {
				t.Errorf("a rule names %q, and no such package exists", tree)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range packages(t) {
		if rel(p.ImportPath) != "" && strings.TrimSpace(p.Doc) == "" {
			t.Errorf("%s has no package comment", rel(p.ImportPath))
		}
	}
}

// exits are calls that end the process or hide from the caller that something
// failed. Only main may.
var exits = map[string]map[string]bool{
	"os":  {"Exit": true},
	"log": {"Fatal": true, "Fatalf": true, "Fatalln": true, "Panic": true, "Panicf": true, "Panicln": true},
}

// vague names say nothing about what is inside.
var vague = map[string]bool{"util": true, "utils": true, "common": true, "helper": true, "helpers": true, "misc": true, "manager": true}

func TestSourceKeepsTheHouseRules(t *testing.T) {
	for _, p := range packages(t) {
		name := rel(p.ImportPath)
		if name == "" {
			continue
		}
		if vague[filepath.Base(name)] {
			t.Errorf("%s: a package is named after what it does", name)
		}
		for _, file := range p.GoFiles {
			checkFile(t, name, filepath.Join(p.Dir, file), p.Name == "main")
		}
	}
}

func checkFile(t *testing.T, pkgName, file string, isMain bool) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	if stem := strings.TrimSuffix(filepath.Base(file), ".go"); vague[stem] {
		t.Errorf("%s/%s.go: a file is named after its one idea", pkgName, stem)
	}
	names := importNames(f)
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
			t.Errorf("%s: init() runs before anyone asked; make it a function that is called", fset.Position(fn.Pos()))
		}
	}
	if isMain {
		return
	}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if id, ok := sel.X.(*ast.Ident); ok && exits[names[id.Name]][sel.Sel.Name] {
			t.Errorf("%s: %s.%s ends the process; return an error", fset.Position(call.Pos()), id.Name, sel.Sel.Name)
		}
		return true
	})
}

// importNames gives the path of each import by its local name.
func importNames(f *ast.File) map[string]string {
	names := map[string]string{}
	for _, imp := range f.Imports {
		path, _ := strconv.Unquote(imp.Path.Value)
		local := filepath.Base(path)
		if imp.Name != nil {
			local = imp.Name.Name
		}
		names[local] = path
	}
	return names
}

// homes are the ideas that live in one package each. A second copy begins with one
// of these calls.
var homes = []struct {
	name string // import path and what is used of it
	only []string
	why  string
}{
	{"crypto/cipher.NewGCM", []string{"internal/seal"}, "what is sealed has one form"},
	{"crypto/cipher.NewGCMWithRandomNonce", []string{"internal/seal"}, "what is sealed has one form"},
	{"syscall.EDQUOT", []string{"sandbox"}, "sandbox.NoSpace tells a full disk"},
	{"golang.org/x/sys/unix.EDQUOT", []string{"sandbox"}, "sandbox.NoSpace tells a full disk"},
	{module + "/egress/policy.Compile", []string{"node", "egress"}, "who enforces a policy compiles it; others Check it"},
}

func TestEachIdeaHasOneHome(t *testing.T) {
	used := map[string]bool{}
	eachFile(t, func(name string, fset *token.FileSet, f *ast.File) {
		imports := importNames(f)
		ast.Inspect(f, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			id, ok := sel.X.(*ast.Ident)
			if !ok {
				return true
			}
			for _, h := range homes {
				if imports[id.Name]+"."+sel.Sel.Name != h.name {
					continue
				}
				if used[h.name] = true; !below(name, h.only...) {
					t.Errorf("%s uses %s: %s", fset.Position(sel.Pos()), h.name, h.why)
				}
			}
			return true
		})
	})
	if !used["crypto/cipher.NewGCM"] || !used["syscall.EDQUOT"] {
		t.Errorf("only %v were found: the test would prove nothing", used)
	}
}

// A file that is synced and renamed is internal/durable's: the order of the steps is
// what a crash asks for.
func TestDurableWritesHaveOneHome(t *testing.T) {
	found := false
	eachFile(t, func(name string, fset *token.FileSet, f *ast.File) {
		if name == "internal/durable" {
			return
		}
		imports := importNames(f)
		for _, d := range f.Decls {
			renames, syncs := false, false
			ast.Inspect(d, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				id, _ := sel.X.(*ast.Ident)
				renames = renames || id != nil && imports[id.Name] == "os" && sel.Sel.Name == "Rename"
				syncs = syncs || sel.Sel.Name == "Sync"
				return true
			})
			found = found || renames
			if renames && syncs {
				t.Errorf("%s syncs and renames by itself: internal/durable does", fset.Position(d.Pos()))
			}
		}
	})
	if !found {
		t.Error("no rename was found: the test would prove nothing")
	}
}

// Files that nothing compiles are read by nobody and rot.
func TestNoForgottenFiles(t *testing.T) {
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && (name == ".git" || name == ".cache" || name == ".venv" || name == "node_modules") {
			return filepath.SkipDir
		}
		for _, ext := range []string{".orig", ".rej", ".swp", "~"} {
			if strings.HasSuffix(name, ext) {
				t.Errorf("%s does not belong here", path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
