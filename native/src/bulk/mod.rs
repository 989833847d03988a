//! Large transfers over TCP, moved by native threads: TLS 1.3, or plain after an authenticated handshake.
//!
//! `python/nexar_native/bulk.pyi` is the contract, `frame.rs` the format on the wire. `channel.rs` says which locks there
//! are and in which order they are taken, `transfers.rs` when memory is free.

mod buffers;
mod channel;
mod config;
mod connection;
mod dial;
mod frame;
mod memory;
mod progress;
mod python;
mod records;
#[cfg(test)]
mod seeded;
mod shared;
mod socket;
mod stream;
mod transfers;
mod worker;

pub use python::module;
