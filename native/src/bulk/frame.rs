//! The bytes of a bulk connection: preamble, hello, welcome, and the headers of frames. Pure.
//!
//! A connection begins with `PREAMBLE` in clear, then speaks TLS. The dialer's first record is a `Hello`, the
//! acceptor's first one a `Welcome`. Frames follow in both directions: a header of 32 bytes, then what it announces.
//! Numbers are big-endian.
//!
//! A transfer is cut at multiples of `CHUNK_BYTES`, so an offset names a chunk, and the length of each chunk follows
//! from the length of the transfer. Chunks of one transfer arrive in any order, over any connection of a channel.

/// A TLS connection begins with 0x16 instead: one port can serve both.
pub const PREAMBLE: &[u8; 8] = b"NXBULK1\n";
/// The version of everything after the TLS handshake.
pub const VERSION: u8 = 1;
/// A multiple of the TLS record size and of every element size.
pub const CHUNK_BYTES: u64 = 256 << 10;
pub const HEADER_BYTES: usize = 32;
pub const MAX_HELLO_BYTES: usize = 4096;
pub const MAX_REASON_BYTES: usize = 256;
/// Connections of one channel.
pub const MAX_CONNECTIONS: usize = 64;

const HELLO_MAGIC: &[u8; 4] = b"NXBH";
const HELLO_BYTES: usize = 26;
const WELCOME_MAGIC: &[u8; 4] = b"NXBW";
const WELCOME_BYTES: usize = 8;
const PLAIN: u8 = 1;
const REFUSED: u8 = 2;

pub type Nonce = [u8; 16];
/// Why bytes violate the protocol.
pub type Violation = &'static str;

/// What a header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// `length` bytes of a transfer follow.
    Chunk {
        transfer: u64,
        offset: u64,
        length: u32,
        total: u64,
    },
    /// The sender stops after the first `sent` bytes of the transfer.
    Withdrawn { transfer: u64, sent: u64 },
    /// Nothing follows on this connection.
    Finish,
    /// The sender ends the channel; `length` bytes of text with the reason follow.
    Abort { length: u32 },
}

const CHUNK: u8 = 1;
const WITHDRAWN: u8 = 2;
const FINISH: u8 = 3;
const ABORT: u8 = 4;

impl Frame {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (kind, length, transfer, offset, total) = match *self {
            Frame::Chunk {
                transfer,
                offset,
                length,
                total,
            } => (CHUNK, length, transfer, offset, total),
            Frame::Withdrawn { transfer, sent } => (WITHDRAWN, 0, transfer, sent, 0),
            Frame::Finish => (FINISH, 0, 0, 0, 0),
            Frame::Abort { length } => (ABORT, length, 0, 0, 0),
        };
        let mut header = [0; HEADER_BYTES];
        header[0] = kind;
        header[4..8].copy_from_slice(&length.to_be_bytes());
        header[8..16].copy_from_slice(&transfer.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..].copy_from_slice(&total.to_be_bytes());
        header
    }

    /// Accepts exactly what `encode` makes of a valid frame.
    pub fn parse(header: &[u8; HEADER_BYTES]) -> Result<Frame, Violation> {
        let number = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("8"));
        let length = u32::from_be_bytes(header[4..8].try_into().expect("4"));
        let (transfer, offset, total) = (number(8), number(16), number(24));
        let frame = match header[0] {
            CHUNK if offset % CHUNK_BYTES != 0 || u64::from(length) != chunk_at(offset, total) => {
                return Err("a chunk that does not fit its transfer");
            }
            CHUNK if offset >= total && (offset, total) != (0, 0) => {
                return Err("a chunk beyond the end of its transfer");
            }
            CHUNK => Frame::Chunk {
                transfer,
                offset,
                length,
                total,
            },
            WITHDRAWN => Frame::Withdrawn {
                transfer,
                sent: offset,
            },
            FINISH => Frame::Finish,
            ABORT if length as usize > MAX_REASON_BYTES => return Err("a reason that is too long"),
            ABORT => Frame::Abort { length },
            _ => return Err("a frame of unknown kind"),
        };
        match frame.encode() == *header {
            true => Ok(frame),
            false => Err("a frame with unused fields that are not zero"),
        }
    }
}

/// The length of the chunk at this offset; 0 beyond the end.
pub fn chunk_at(offset: u64, total: u64) -> u64 {
    total.saturating_sub(offset).min(CHUNK_BYTES)
}

/// How many chunks a transfer has. An empty one has one, which is empty.
pub fn chunks_of(total: u64) -> u64 {
    total.div_ceil(CHUNK_BYTES).max(1)
}

/// The dialer's first record on each connection of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The dialer wants to stop encrypting after the welcome.
    pub plain: bool,
    /// This connection among the channel's.
    pub index: u8,
    pub count: u8,
    /// Names the channel: equal on all its connections, new for each dial.
    pub nonce: Nonce,
    /// What the layer above says.
    pub text: Vec<u8>,
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut record = Vec::with_capacity(HELLO_BYTES + self.text.len());
        record.extend_from_slice(HELLO_MAGIC);
        let flags = if self.plain { PLAIN } else { 0 };
        record.extend_from_slice(&[VERSION, flags, self.index, self.count]);
        record.extend_from_slice(&self.nonce);
        record.extend_from_slice(&(self.text.len() as u16).to_be_bytes());
        record.extend_from_slice(&self.text);
        record
    }

    /// A hello is exactly one record.
    pub fn parse(record: &[u8]) -> Result<Hello, Violation> {
        let (fixed, text) = record
            .split_at_checked(HELLO_BYTES)
            .ok_or("a hello that is too short")?;
        let &[_, _, _, _, version, flags, index, count, ..] = fixed else {
            return Err("a hello that is too short");
        };
        if !fixed.starts_with(HELLO_MAGIC) {
            return Err("a record that is no hello");
        }
        if version != VERSION {
            return Err("another version of the bulk protocol");
        }
        let length = usize::from(u16::from_be_bytes([fixed[24], fixed[25]]));
        let valid = index < count && usize::from(count) <= MAX_CONNECTIONS && flags & !PLAIN == 0;
        if !valid || length != text.len() || length > MAX_HELLO_BYTES {
            return Err("a hello with impossible numbers");
        }
        Ok(Hello {
            plain: flags & PLAIN != 0,
            index,
            count,
            nonce: fixed[8..24].try_into().expect("16"),
            text: text.to_vec(),
        })
    }
}

/// The acceptor's first record on each connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Welcome {
    /// With `plain` this is the last encrypted record, in both directions.
    Accepted {
        plain: bool,
    },
    Refused(String),
}

impl Welcome {
    pub fn encode(&self) -> Vec<u8> {
        let (flags, reason) = match self {
            Welcome::Accepted { plain: false } => (0, ""),
            Welcome::Accepted { plain: true } => (PLAIN, ""),
            Welcome::Refused(reason) => (REFUSED, shortened(reason)),
        };
        let mut record = WELCOME_MAGIC.to_vec();
        record.extend_from_slice(&[VERSION, flags]);
        record.extend_from_slice(&(reason.len() as u16).to_be_bytes());
        record.extend_from_slice(reason.as_bytes());
        record
    }

    pub fn parse(record: &[u8]) -> Result<Welcome, Violation> {
        let (fixed, reason) = record
            .split_at_checked(WELCOME_BYTES)
            .ok_or("a welcome that is too short")?;
        if !fixed.starts_with(WELCOME_MAGIC) {
            return Err("a record that is no welcome");
        }
        let length = usize::from(u16::from_be_bytes([fixed[6], fixed[7]]));
        if length != reason.len() || length > MAX_REASON_BYTES {
            return Err("a welcome with impossible numbers");
        }
        match (fixed[4], fixed[5], length) {
            (VERSION, 0, 0) => Ok(Welcome::Accepted { plain: false }),
            (VERSION, PLAIN, 0) => Ok(Welcome::Accepted { plain: true }),
            // A refusal is understood in every version.
            (_, REFUSED, _) => Ok(Welcome::Refused(
                String::from_utf8_lossy(reason).into_owned(),
            )),
            _ => Err("a welcome with impossible numbers"),
        }
    }
}

/// The longest prefix that fits a reason and ends between two characters.
pub fn shortened(reason: &str) -> &str {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bulk::seeded::Random;

    fn frames() -> Vec<Frame> {
        let chunk = |offset, length, total| Frame::Chunk {
            transfer: u64::MAX,
            offset,
            length,
            total,
        };
        vec![
            chunk(0, 0, 0),
            chunk(0, 1, 1),
            chunk(0, CHUNK_BYTES as u32, CHUNK_BYTES),
            chunk(CHUNK_BYTES, 7, CHUNK_BYTES + 7),
            chunk(u64::MAX - CHUNK_BYTES + 1, CHUNK_BYTES as u32 - 1, u64::MAX),
            Frame::Withdrawn {
                transfer: 1,
                sent: u64::MAX,
            },
            Frame::Finish,
            Frame::Abort { length: 256 },
        ]
    }

    #[test]
    fn frames_survive_the_wire() {
        for frame in frames() {
            assert_eq!(Frame::parse(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn chunks_that_do_not_fit_are_violations() {
        for (offset, length, total) in [
            (1, 1, 2),
            (0, 0, 1),
            (0, 2, 1),
            (CHUNK_BYTES, 0, CHUNK_BYTES),
            (CHUNK_BYTES, 0, 0),
            (0, u32::MAX, u64::MAX),
            (2 * CHUNK_BYTES, 1, CHUNK_BYTES + 1),
        ] {
            let frame = Frame::Chunk {
                transfer: 1,
                offset,
                length,
                total,
            };
            assert!(Frame::parse(&frame.encode()).is_err(), "{frame:?}");
        }
    }

    #[test]
    fn every_changed_byte_is_another_frame_or_a_violation() {
        for frame in frames() {
            for at in 0..HEADER_BYTES {
                let mut header = frame.encode();
                header[at] ^= 0x55;
                assert_ne!(Frame::parse(&header), Ok(frame));
            }
        }
    }

    #[test]
    fn random_headers_are_rejected_or_canonical() {
        let mut random = Random::new(1);
        for round in 0..200_000u32 {
            let mut header = [0; HEADER_BYTES];
            random.fill(&mut header);
            if round % 2 == 0 {
                header[0] %= 6;
                header[1..4].fill(0);
            }
            if let Ok(frame) = Frame::parse(&header) {
                assert_eq!(frame.encode(), header);
            }
        }
    }

    fn hello() -> Hello {
        Hello {
            plain: true,
            index: 1,
            count: 2,
            nonce: [7; 16],
            text: b"who I am".to_vec(),
        }
    }

    #[test]
    fn hellos_survive_the_wire() {
        for text in [vec![], vec![0; MAX_HELLO_BYTES]] {
            let hello = Hello { text, ..hello() };
            assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
        }
    }

    #[test]
    fn a_hello_truncated_at_any_byte_is_a_violation() {
        let record = hello().encode();
        for length in 0..record.len() {
            assert!(Hello::parse(&record[..length]).is_err());
        }
        assert!(Hello::parse(&[record, vec![0]].concat()).is_err());
    }

    #[test]
    fn impossible_hellos_are_violations() {
        for (index, count) in [(0, 0), (1, 1), (0, MAX_CONNECTIONS as u8 + 1)] {
            let hello = Hello {
                index,
                count,
                ..hello()
            };
            assert!(Hello::parse(&hello.encode()).is_err());
        }
        let text = vec![0; MAX_HELLO_BYTES + 1];
        assert!(Hello::parse(&Hello { text, ..hello() }.encode()).is_err());
    }

    #[test]
    fn welcomes_survive_the_wire() {
        for welcome in [
            Welcome::Accepted { plain: true },
            Welcome::Accepted { plain: false },
            Welcome::Refused("because".to_owned()),
        ] {
            assert_eq!(Welcome::parse(&welcome.encode()), Ok(welcome));
        }
    }

    #[test]
    fn random_hellos_and_welcomes_are_rejected_or_canonical() {
        let mut random = Random::new(2);
        for _ in 0..50_000 {
            let mut record = hello().encode();
            for _ in 0..random.below(3) {
                let at = random.below(record.len() as u64) as usize;
                record[at] = random.next() as u8;
            }
            record.truncate(random.below(record.len() as u64 + 1) as usize);
            if let Ok(parsed) = Hello::parse(&record) {
                assert_eq!(parsed.encode(), record);
            }
            let mut noise = vec![0; random.below(40) as usize];
            random.fill(&mut noise);
            let _ = Welcome::parse(&noise);
        }
    }

    #[test]
    fn a_long_reason_is_shortened_between_characters() {
        let reason = "é".repeat(MAX_REASON_BYTES);
        assert_eq!(shortened(&reason).len(), MAX_REASON_BYTES);
        assert_eq!(shortened(&format!("x{reason}")).len(), MAX_REASON_BYTES - 1);
        let Ok(Welcome::Refused(said)) =
            Welcome::parse(&Welcome::Refused(format!("x{reason}")).encode())
        else {
            panic!("not a refusal");
        };
        assert!(!said.contains('\u{fffd}'));
    }
}
