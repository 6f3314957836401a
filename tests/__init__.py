"""The tests; a package, so that helpers are imported as ``tests.toy`` and never found twice."""
