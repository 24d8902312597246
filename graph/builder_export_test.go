package graph

// Draft is the definition of a builder as it is so far, right or wrong.
func Draft(b *Builder) *Definition { return b.draft() }
