"""Loading, generating, measuring: what an application holds."""
