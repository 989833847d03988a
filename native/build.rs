//! Sets `has_avx512` if the compiler can compile functions for AVX-512, which it can since Rust 1.89.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(has_avx512)");
    if minor_version().is_some_and(|minor| minor >= 89) {
        println!("cargo:rustc-cfg=has_avx512");
    }
}

/// The second number of the compiler's version, as in `rustc 1.89.0 (29483883e 2025-08-04)`.
fn minor_version() -> Option<u32> {
    let compiler = env::var_os("RUSTC")?;
    let output = Command::new(compiler).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace()
        .nth(1)?
        .split('.')
        .nth(1)?
        .parse()
        .ok()
}
