package graph

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/overloads"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
	"google.golang.org/protobuf/types/known/structpb"
)

// Anybody who may deploy a definition can write expensive expressions, and expressions are evaluated while an instance
// is locked. So their cost is limited. The limits are in CEL's units of cost and not in time, because the same facts
// then always cost the same: whether an expression fails does not depend on the machine or its load, and a repeated
// settlement decides the same. A millisecond is about 25,000 units.
//
// The limit of one evaluation is not enough. A token may pass a thousand gateways in one decision, so there is a budget
// for all expressions of a decision, too. It is about 20 ms.
const (
	costLimit  = 100_000 // of one evaluation
	costBudget = 500_000 // of all evaluations in one decision, that is, for one event
)

// errCost is the error of an expression that costs more than costLimit.
var errCost = fmt.Errorf("it costs more than %d units: have it look at fewer elements, or have a step work it out", costLimit)

// errBudget is the error of an expression that is evaluated after costBudget is used up.
var errBudget = fmt.Errorf("the expressions before it, in this decision, have cost more than %d units together: "+
	"have them look at fewer elements, have a step work it out once, or put a step between the gateways", costBudget)

// An expression is a compiled CEL expression.
type expression struct {
	text    string
	program cel.Program
	gives   *cel.Type // its type, as far as that is known at compile time
	steps   []string  // the nodes whose facts it reads by name
	every   bool      // it uses steps in another way, so it may read the facts of any node
}

// facts are what expressions may read.
type facts struct {
	input  any            // the instance's input
	steps  map[string]any // the latest result of each node
	result any            // in Node.Out: the node's result
	item   any            // in Node.In of an each: the element

	spent *uint64 // what this decision has cost so far; nil: not counted
}

// charge adds the cost of an evaluation to what the decision has spent.
func (f facts) charge(cost uint64) {
	if f.spent != nil {
		*f.spent += cost
	}
}

// A use says where an expression is written, and so what it can read.
type use int

const (
	ofInstance use = iota // reads input and steps
	ofElement             // reads item, input and steps
	ofResult              // reads result only
)

func (u use) String() string {
	return [...]string{"it reads input and steps.<node>", "it reads item, input and steps.<node>", "it reads result, and nothing else"}[u]
}

var environments = [...]func() (*cel.Env, error){
	ofInstance: environment("input", "steps"), ofElement: environment("input", "steps", "item"), ofResult: environment("result"),
}

func environment(names ...string) func() (*cel.Env, error) {
	return sync.OnceValues(func() (*cel.Env, error) {
		options := []cel.EnvOption{cel.CrossTypeNumericComparisons(true)} // JSON numbers are doubles; an author compares them with integers
		for _, name := range names {
			kind := cel.DynType
			if name == "steps" {
				kind = cel.MapType(cel.StringType, cel.DynType)
			}
			options = append(options, cel.Variable(name, kind))
		}
		return cel.NewEnv(options...)
	})
}

func compile(text string, in use) (*expression, error) {
	env, err := environments[in]()
	if err != nil {
		return nil, err
	}
	compiled, issues := env.Compile(text)
	if issues.Err() != nil {
		return nil, fmt.Errorf("%s", strings.TrimPrefix(issues.String(), "ERROR: "))
	}
	program, err := env.Program(compiled, cel.CostTracking(prices{}), cel.CostLimit(costLimit), cel.EvalOptions(cel.OptOptimize))
	if err != nil {
		return nil, err
	}
	e := &expression{text: text, program: program, gives: compiled.OutputType()}
	e.readsOf(compiled.NativeRep().Expr())
	return e, nil
}

// readsOf finds the nodes whose facts the expression reads: steps.name, steps["name"], "name" in steps. Any other use of
// steps may read the facts of all nodes, and sets every. The shell loads only facts that an expression ahead may read.
func (e *expression) readsOf(root ast.Expr) {
	named := map[int64]bool{} // the uses of steps that name a node
	note := func(steps ast.Expr, name string) {
		named[steps.ID()] = true
		e.steps = append(e.steps, name)
	}
	isSteps := func(x ast.Expr) bool { return x.Kind() == ast.IdentKind && x.AsIdent() == "steps" }
	text := func(x ast.Expr) (string, bool) {
		if x.Kind() != ast.LiteralKind {
			return "", false
		}
		s, ok := x.AsLiteral().Value().(string)
		return s, ok
	}
	ast.PreOrderVisit(root, ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.SelectKind:
			if s := x.AsSelect(); isSteps(s.Operand()) {
				note(s.Operand(), s.FieldName())
			}
		case ast.CallKind:
			args := x.AsCall().Args()
			if len(args) != 2 {
				return
			}
			switch x.AsCall().FunctionName() {
			case operators.Index:
				if name, ok := text(args[1]); ok && isSteps(args[0]) {
					note(args[0], name)
				}
			case operators.In:
				if name, ok := text(args[0]); ok && isSteps(args[1]) {
					note(args[1], name)
				}
			}
		case ast.IdentKind:
			e.every = e.every || isSteps(x) && !named[x.ID()]
		}
	}))
}

// canBeTrue reports whether the expression may give a boolean, as far as its type is known.
func (e *expression) canBeTrue() bool {
	return e.gives.IsExactType(cel.BoolType) || e.gives.IsExactType(cel.DynType)
}

// prices sets the cost of calls that take long on large values. CEL counts next to nothing for them here, because it does
// not know the types of facts when it compiles an expression.
type prices struct{}

// CallCost returns the cost of a call; nil: CEL's own.
func (prices) CallCost(function, _ string, args []ref.Val, result ref.Val) *uint64 {
	size := 0
	switch function {
	case operators.Add:
		size = length(result)
	case operators.Equals, operators.NotEquals:
		size = min(extent(args[0]), extent(args[1]))
	case operators.Less, operators.LessEquals, operators.Greater, operators.GreaterEquals:
		size = min(length(args[0]), length(args[1]))
	case overloads.Size, overloads.TypeConvertString, overloads.TypeConvertBytes:
		size = length(args[0])
	default:
		return nil
	}
	cost := 1 + uint64(size)/10
	return &cost
}

// length returns the number of bytes of a text; 0 for other values.
func length(v ref.Val) int {
	switch v := v.(type) {
	case types.String:
		return len(v)
	case types.Bytes:
		return len(v)
	}
	return 0
}

// extent returns the length of a text, or an estimate of it for a list or map: 100 bytes an element.
func extent(v ref.Val) int {
	if all, ok := v.(traits.Sizer); ok && length(v) == 0 {
		if n, ok := all.Size().(types.Int); ok {
			return 100 * int(n)
		}
	}
	return length(v)
}

// eval evaluates the expression, unless the budget of the decision is used up.
func (e *expression) eval(f facts) (ref.Val, error) {
	if f.spent != nil && *f.spent > costBudget {
		return nil, fmt.Errorf("%s: %w", e.text, errBudget)
	}
	value, details, err := e.program.Eval(map[string]any{"input": f.input, "steps": f.steps, "result": f.result, "item": f.item})
	cost := details.ActualCost()
	if cost != nil {
		f.charge(*cost)
	}
	if err != nil && cost != nil && *cost > costLimit {
		err = errCost
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.text, err)
	}
	return value, nil
}

// condition evaluates a condition. A missing key is an error, never false: a misspelt key would otherwise choose a
// branch.
func (e *expression) condition(f facts) (bool, error) {
	value, err := e.eval(f)
	if err != nil {
		return false, err
	}
	b, ok := value.(types.Bool)
	if !ok {
		return false, fmt.Errorf("%s: gives %s, a condition gives true or false", e.text, value.Type())
	}
	return bool(b), nil
}

// value evaluates the expression to a JSON value. The size of the value is charged, too: what is made is stored.
func (e *expression) value(f facts) (json.RawMessage, error) {
	value, err := e.eval(f)
	if err != nil {
		return nil, err
	}
	native, err := value.ConvertToNative(jsonValue)
	if err != nil {
		return nil, fmt.Errorf("%s: gives a value that JSON cannot represent: %w", e.text, err)
	}
	text, err := native.(*structpb.Value).MarshalJSON()
	// Blanks are not counted: protobuf's JSON deliberately varies them from build to build.
	f.charge(uint64(10*(bytes.Count(text, []byte{','})+bytes.Count(text, []byte{':'})) + (len(text)-bytes.Count(text, []byte{' '}))/100))
	return text, err
}

var jsonValue = reflect.TypeFor[*structpb.Value]()
