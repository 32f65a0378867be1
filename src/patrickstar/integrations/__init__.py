"""What other libraries need to work with patrickstar; each package here is named after its library."""
