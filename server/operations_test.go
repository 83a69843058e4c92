package server

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// notOperations are the exported methods of a server that no caller reaches: they
// are for who runs it.
var notOperations = []string{
	"Authenticate", "Vouched", "Permit", "May", // come before an operation
	"Reconcile", "Run", "Drain", "Draining", // its life
	"EnsureFirstKey", "PublishImage", // at its first start
	"Reach", // for the gateway and SSH: what it does beside the operations is in reach.go
}

// Every exported method of *Server begins an operation of the table as its first
// step and ends it, and every row of the table is an operation of the code.
func TestEveryOperationIsInTheTable(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	begun := map[Operation]string{}
	methods := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			m, ok := d.(*ast.FuncDecl)
			if !ok || m.Recv == nil || receiver(m) != "Server" || slices.Contains(notOperations, m.Name.Name) {
				continue
			}
			op, ok := beginsWith(m)
			if !ok && !m.Name.IsExported() {
				continue // part of an operation
			}
			methods++
			if !ok {
				t.Errorf("%s: %s does not begin with s.begin and defer call.end(&err)", name, m.Name.Name)
				continue
			}
			if _, known := operations[op]; !known {
				t.Errorf("%s begins %q, which is not in the table", m.Name.Name, op)
			}
			if other := begun[op]; other != "" {
				t.Errorf("%s and %s are both %q", m.Name.Name, other, op)
			}
			begun[op] = m.Name.Name
		}
	}
	if methods < 20 {
		t.Errorf("only %d operations were found", methods)
	}
	for op := range operations {
		if begun[op] == "" {
			t.Errorf("%s is in the table and no operation of the server", op)
		}
	}
}

func receiver(m *ast.FuncDecl) string {
	typ := m.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	id, _ := typ.(*ast.Ident)
	if id == nil {
		return ""
	}
	return id.Name
}

// beginsWith is the operation of "ctx, call, err := s.begin(ctx, "op", …)", where
// that comes first, then its error, then "defer call.end(&err)".
func beginsWith(m *ast.FuncDecl) (Operation, bool) {
	body := m.Body.List
	if len(body) < 3 {
		return "", false
	}
	assign, ok := body[0].(*ast.AssignStmt)
	if !ok || len(assign.Rhs) != 1 {
		return "", false
	}
	call, ok := assign.Rhs[0].(*ast.CallExpr)
	if !ok || !isSelector(call.Fun, "begin") || len(call.Args) < 2 {
		return "", false
	}
	lit, ok := call.Args[1].(*ast.BasicLit)
	if _, checked := body[1].(*ast.IfStmt); !ok || !checked {
		return "", false
	}
	end, ok := body[2].(*ast.DeferStmt)
	if !ok || !isSelector(end.Call.Fun, "end") {
		return "", false
	}
	name, err := strconv.Unquote(lit.Value)
	return Operation(name), err == nil
}

func isSelector(e ast.Expr, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == name
}

// Every row says who may, with a scope that a key can have; every method of the
// protos and every plain route is an operation; what is none is closed.
func TestEveryCallIsAnOperation(t *testing.T) {
	s := newWorld(t).server
	for op, r := range operations {
		if r.role == "" || !slices.Contains(sandbox.ScopeNames, r.scope) {
			t.Errorf("%s: role %q, scope %q", op, r.role, r.scope)
		}
		if r.role == readonly && (r.audit != never || r.new || r.keyed || r.takes != 0) {
			t.Errorf("%s is for readonly keys, and is more than looking", op)
		}
	}
	for path, op := range nativeProcedures {
		if _, known := operations[op]; !known {
			t.Errorf("%s would be %s, which is not in the table", path, op)
		}
	}
	for pattern, op := range nativeRoutes(s) {
		if _, known := operations[op]; !known {
			t.Errorf("%s would be %s, which is not in the table", pattern, op)
		}
	}
	for _, p := range procedures() {
		if nativeProcedures[p] == "" {
			t.Errorf("%s is no procedure of the dialect", p)
		}
	}
	if a, b := len(procedures()), len(nativeProcedures); a != b {
		t.Errorf("procedures() has %d methods, the registry %d", a, b)
	}
	root := withCaller(t.Context(), caller{key: store.Key{Role: sandbox.RootRole, Tenant: sandbox.DefaultTenant}})
	if err := s.Permit(root, "sandbox.something_new"); sandbox.ClassOf(err) != sandbox.Denied {
		t.Error("an operation that nobody thought about is open:", err)
	}
	if _, _, err := s.begin(t.Context(), "sandbox.get"); sandbox.ClassOf(err) != sandbox.Denied {
		t.Error("an operation without a caller is open:", err)
	}
}

// A request that has an idempotency key is of an operation that takes one.
func TestKeyedOperations(t *testing.T) {
	for path, op := range nativeProcedures {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(path, "/"), "/", ".")))
		if err != nil {
			t.Fatal(err)
		}
		has := d.(protoreflect.MethodDescriptor).Input().Fields().ByName("idempotency_key") != nil
		if op == "sandbox.kill" { // by the key of the create
			has = false
		}
		if has != operations[op].keyed {
			t.Errorf("%s: a key in the request %t, in the table %t", op, has, operations[op].keyed)
		}
	}
}
