package sql

// MigrationsOf is Migrations for other files than the embedded ones.
var MigrationsOf = migrations
