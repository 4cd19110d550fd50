"""Jobs of published models by name, as shapes without values: for plans and for timing-only runs in virtual time."""
