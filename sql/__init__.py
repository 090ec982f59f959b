"""The SQL statements of dualstore, one a file; read with `dualstore.database.read_sql`."""
